"""The schema for merging and error messages: the values that each place of a config may have."""

import json
import types
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from configs.errors import NOT_SET
from configs.reading.yaml_values import Value
from configs.schema.base import Schema


@dataclass(frozen=True, slots=True)
class Shape:
    """One place of the schema."""

    members: tuple[Any, ...] = ()
    """The members of the union at this place, or its only type, with pydantic's metadata. Empty: the schema
    has no such place."""
    field: FieldInfo | None = None
    """None for an item of a list or a mapping, and for the root."""

    @classmethod
    def of(cls, annotation: Any, field: FieldInfo | None = None) -> "Shape":
        return cls(tuple(_members(annotation)), field)

    @property
    def models(self) -> list[type[Schema]]:
        """The classes that a block may have; ``tag_key`` picks one of several."""
        classes = (m for m in self.members if isinstance(m, type) and get_origin(m) is None)
        return [one for one in classes if issubclass(one, Schema)]

    @property
    def choices(self) -> list[Any]:
        """The values of a Literal."""
        return [choice for m in self.members if get_origin(m) is Literal for choice in get_args(m)]

    @property
    def item(self) -> Any:
        """The annotation of the items of a list or a mapping, None for anything else."""
        kinds = {list: 0, tuple: 0, dict: 1}
        return next((get_args(m)[kinds[get_origin(m)]] for m in self.members if get_origin(m) in kinds), None)

    @property
    def length(self) -> int | None:
        """The length of a list of fixed length; None for anything else."""
        tuples = [get_args(m) for m in self.members if get_origin(m) is tuple]
        return next((len(items) for items in tuples if items[-1] is not Ellipsis), None)

    @property
    def tag_key(self) -> str | None:
        """The key whose value picks the variant of a block; None if there is only one class."""
        if len(self.models) < 2:
            return None
        return next(
            m.discriminator
            for m in (self.field, *self.members)
            if isinstance(m, FieldInfo) and isinstance(m.discriminator, str)
        )

    @property
    def tags(self) -> dict[str, type[Schema]]:
        """The variants by their tag."""
        tags = {model: get_args(model.model_fields[self.tag_key].annotation) for model in self.models}
        return {tag: model for model in self.models for tag in tags[model]}

    @property
    def default(self) -> Any:
        if self.field is None or self.field.is_required():
            return NOT_SET
        return self.field.get_default(call_default_factory=True, validated_data={})

    def tag_of(self, block: Value | None) -> Any:
        """The tag of a block, or else that of the default; None if neither has one."""
        key = self.tag_key
        tag = block.at([key]) if block is not None else None
        if tag is not None:
            return tag.data
        return getattr(self.default, key) if key and isinstance(self.default, Schema) else None

    def pick(self, tag: Any) -> "Shape":
        """Only the variant with this tag; all variants if none has it."""
        chosen = self.tags.get(tag) if self.tag_key and isinstance(tag, str) else None
        return Shape((chosen,), self.field) if chosen else self

    def variant(self, block: Value | None) -> "Shape":
        """Only the variant of this block."""
        return self.pick(self.tag_of(block)) if self.tag_key else self

    def child(self, key: Hashable) -> "Shape":
        """The place of a key (or of an item); empty if the schema has none."""
        for model in self.models:
            if isinstance(key, str) and key in model.model_fields:
                field = model.model_fields[key]
                return Shape.of(field.annotation, field)
        return Shape.of(self.item) if self.item is not None and not self.models else Shape()

    def takes(self, key: Hashable, value: Any) -> bool:
        """Whether a block may have this plain value at a key; False if the schema has no such key."""
        model = next((model for model in self.models if key in model.model_fields), None)
        if model is None:
            return False
        try:
            model.model_validate_json(json.dumps({key: value}), strict=True)
        except ValidationError as error:
            return all(details["loc"][:1] != (key,) for details in error.errors())
        return True

    def names(self) -> list[str]:
        """All keys that a block may have."""
        return list(dict.fromkeys(key for model in self.models for key in model.model_fields))


def _members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _members(argument)
    else:
        yield annotation
