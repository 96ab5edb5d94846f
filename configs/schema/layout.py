"""The layout of the learner's processes."""

import json
import math
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ValidationError

from configs.errors import Contradiction, did_you_mean
from configs.schema.base import Count, Schema


class LayoutConfig(Schema):
    """Sizes of Megatron's parallel groups. One copy of the model takes tp * cp * pp processes: tp and pp split
    its weights, cp the tokens of every sequence. There are dp copies."""

    tp: Count = 1
    """Tensor parallel: every matrix is split over this many ranks."""
    pp: Count = 1
    """Pipeline parallel: the layers are split over this many stages (1F1B)."""
    vpp: Count = 1
    """Model chunks of each stage; above 1 the pipeline is interleaved."""
    sp: bool = False
    """Sequence parallel: between matrices, the tensor-parallel ranks split the tokens."""
    cp: Count = 1
    """Context parallel: every sequence is split over this many ranks. Each has a cp-th of its tokens, and
    gathers the keys and values of all tokens. For sequences whose activations do not fit on one GPU."""
    ep: Count = 1
    """Expert parallel: the experts of a mixture-of-experts model are split over this many of the tp * cp * dp
    ranks of a stage."""
    dp: Count | Literal["auto"] = "auto"
    """Data parallel. auto: as many copies as fit on the GPUs that the servers leave free; without a GPU as
    few as ep allows, usually one."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.sp and self.tp == 1:
            yield Contradiction(
                ("sp", "tp"),
                "sp=true splits tokens over tensor-parallel ranks, of which tp=1 has one",
                "set tp=2 or more, or sp=false",
            )
        if self.vpp > 1 and self.pp == 1:
            yield Contradiction(
                ("vpp", "pp"),
                f"vpp={self.vpp} interleaves the stages of a pipeline, of which pp=1 has one",
                "set pp=2 or more, or vpp=1",
            )
        if self.ep > 1 and self.tp > 1 and not self.sp:
            yield Contradiction(
                ("ep", "tp", "sp"),
                f"ep={self.ep} with tp={self.tp} needs sp=true: Megatron routes tokens to experts from where they are split",
            )
        ranks = self.tp * self.cp * self.dp if self.dp != "auto" else None
        if ranks is not None and ranks % self.ep:
            yield Contradiction(
                ("ep", "tp", "cp", "dp"),
                f"ep={self.ep} does not divide the tp*cp*dp={ranks} ranks of a pipeline stage",
                "use ep or dp that does",
            )

    @property
    def model_size(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tp * self.cp * self.pp

    @property
    def microbatch_multiple(self) -> int:
        """The number of micro-batches of a minibatch on each rank is a multiple of this: an interleaved pipeline
        fills all its stages at a time."""
        return self.pp if self.vpp > 1 else 1

    @property
    def dp_size(self) -> int:
        """``dp``. Raises ValueError while it is auto: see ``resolved``."""
        if self.dp == "auto":
            raise ValueError(
                "layout.dp=auto has not been resolved: the number of processes is not known here"
            )
        return self.dp

    @property
    def world_size(self) -> int:
        """Processes of the learner. Raises ValueError while dp is auto."""
        return self.model_size * self.dp_size

    def resolved(self, num_processes: int) -> "LayoutConfig":
        """This layout on ``num_processes`` processes, with a number for dp. Raises ValueError if the
        processes do not hold a whole number of copies, or hold a number that ep does not allow."""
        if self.dp != "auto":
            return self
        if num_processes < self.model_size or num_processes % self.model_size:
            raise ValueError(
                f"layout.dp=auto: {num_processes} processes are not a multiple of the {self.model_size} that one copy of the model takes "
                f"(tp={self.tp} * cp={self.cp} * pp={self.pp}); change these, or the number of processes"
            )
        dp = num_processes // self.model_size
        if dp % self._dp_multiple:
            raise ValueError(
                f"layout.dp=auto: {num_processes} processes make dp={dp}, but ep={self.ep} with tp={self.tp} and cp={self.cp} needs a "
                f"multiple of {self._dp_multiple}; use another number of processes, or a smaller ep"
            )
        return self._with_dp(dp)

    def smallest(self) -> "LayoutConfig":
        """This layout, with the least number of copies that ep allows for dp=auto: one if no experts are
        split."""
        return self if self.dp != "auto" else self._with_dp(self._dp_multiple)

    @property
    def _dp_multiple(self) -> int:
        """ep divides tp * cp * dp if and only if dp is a multiple of this."""
        return self.ep // math.gcd(self.ep, self.tp * self.cp)

    def _with_dp(self, dp: int) -> "LayoutConfig":
        sizes: dict[str, Any] = self.model_dump() | {"dp": dp}
        return LayoutConfig(**sizes)


ONE_PROCESS = LayoutConfig(dp=1)


def parse_layout(text: str) -> LayoutConfig:
    """Reads a layout of the command line: ``tp=2,sp,pp=2``, where ``sp`` alone means ``sp=true``. "" is all
    defaults. Raises ValueError, in one sentence with field, value and fix.
    """
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in LayoutConfig.model_fields:
            fix = did_you_mean(name, list(LayoutConfig.model_fields), "fields")
            raise ValueError(f"layout {text!r}: unknown field {name!r}; {fix}")
        if name in values:
            raise ValueError(f"layout {text!r} gives {name} twice; give it once")
        values[name] = _layout_value(text, name, value if "=" in part else None)
    try:
        return LayoutConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        reason = (
            first.get("ctx", {}).get("error") or f"{first['loc'][0]}: {first['msg']}, not {first['input']}"
        )
        raise ValueError(f"layout {text!r}: {reason}") from error


def _layout_value(text: str, name: str, value: str | None) -> Any:
    if name == "sp" and value in (None, "true", "false"):
        return value != "false"
    if value is not None and value.isdecimal() and name != "sp":
        return int(value)
    if (name, value) == ("dp", "auto"):
        return value
    form = {"sp": "sp, sp=true or sp=false", "dp": "dp=auto or dp=N"}.get(name, f"{name}=N")
    shown = name if value is None else f"{name}={value}"
    raise ValueError(f"layout {text!r}: {shown} is no value of this field; write {form}, N a whole number")


def layout_text(layout: LayoutConfig) -> str:
    """The text of a layout for ``parse_layout``: the fields in their order, without those that are 1, false
    or auto; ``tp=1`` if all are. Equal layouts have equal texts."""
    sizes = {n: v for n, v in layout.model_dump().items() if v is True or v not in (1, False, "auto")}
    return ",".join(name if value is True else f"{name}={value}" for name, value in sizes.items()) or "tp=1"


def as_overrides(layout: LayoutConfig) -> list[str]:
    """Dotted overrides that give a config this layout."""
    return [f"layout.{name}={json.dumps(value)}" for name, value in layout.model_dump().items()]
