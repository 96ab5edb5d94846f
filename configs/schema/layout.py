"""How the learner's processes are laid out."""

from configs.schema.base import PositiveInt, Schema


class LayoutConfig(Schema):
    data_parallel: PositiveInt = 1
    tensor_parallel: PositiveInt = 1

    @property
    def world_size(self) -> int:
        return self.data_parallel * self.tensor_parallel
