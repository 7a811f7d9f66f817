"""The pipeline schedule: for each device, the operations that it runs, in their order.

Text form, one cell for each operation, as in the CSV that torch.distributed.pipelining's schedule runtime loads: the
stage, the kind, the microbatch: "2F3". A schedule whose blocks are cut into parts (CrossPipe's sub-blocks,
arXiv:2507.00217, section 4.2) names the part after a dot: "2F3.1". Reading the text gives the same schedule
again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from dips.core.errors import ConfigError


class Kind(StrEnum):
    """What an operation computes for one microbatch on one stage.

    D: the gradient of the input; W: of the weights; B: both at once. The value is the letter of the text form, which is
    torch's: there D is called I.
    """

    F = "F"
    D = "I"
    W = "W"
    B = "B"

    __hash__ = str.__hash__  # Enum's own is slow Python code; operations are looked up millions of times


_CELL = re.compile(r"(\d{1,6})([FIWB])(\d{1,6})(?:\.(\d{1,3}))?", re.ASCII)


class Op(NamedTuple):
    """One operation, or one part of it."""

    kind: Kind
    stage: int  # of the model (a device may hold several), from 0 on
    microbatch: int
    part: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}" + (f".{self.part}" if self.part else "")

    @classmethod
    def parse(cls, cell: str) -> Op:
        """Parse the text of an operation, the inverse of str(). Raises ConfigError."""
        found = _CELL.fullmatch(cell.strip())
        if found is None:
            raise ConfigError(f"{cell!r} is not an operation: write STAGE KIND MICROBATCH without blanks, as in 2F3")
        stage, kind, microbatch, part = found.groups()
        return cls(Kind(kind), int(stage), int(microbatch), int(part or 0))


@dataclass(frozen=True)
class Schedule:
    """A schedule: for each device, the operations that it runs, in their order."""

    name: str
    device_of_stage: tuple[int, ...]  # where each stage of the model runs
    n_microbatches: int
    orders: tuple[tuple[Op, ...], ...]
    parts: int = 1  # pieces that every block is cut into; only the last one sends

    @property
    def n_devices(self) -> int:
        return len(self.orders)

    @property
    def n_stages(self) -> int:
        return len(self.device_of_stage)

    @property
    def n_ops(self) -> int:
        return sum(len(order) for order in self.orders)

    @property
    def chunks(self) -> int:
        """The number of stages on the device with the most stages."""
        return max(Counter(self.device_of_stage).values())

    @property
    def split(self) -> bool:
        """Whether gradients of inputs and of weights are operations of their own."""
        return any(op.kind is Kind.D for order in self.orders for op in order)

    def stages_of(self, device: int) -> tuple[int, ...]:
        """The stages on a device, in the order of the model."""
        return tuple(stage for stage, place in enumerate(self.device_of_stage) if place == device)

    def with_parts_as_stages(self) -> Schedule:
        """The same schedule for a runtime without parts: each part is a stage of its own, `parts` adjacent ones on a
        device, in reverse order for backward passes."""
        if self.parts == 1:
            return self
        parts, last = self.parts, self.parts - 1
        orders = tuple(
            tuple(
                Op(op.kind, op.stage * parts + (op.part if op.kind is Kind.F else last - op.part), op.microbatch)
                for op in order
            )
            for order in self.orders
        )
        places = tuple(device for device in self.device_of_stage for _ in range(parts))
        return Schedule(self.name, places, self.n_microbatches, orders)

    def to_csv(self) -> str:
        """The text form: one line for each device, one cell for each operation."""
        return "\n".join(",".join(map(str, order)) for order in self.orders) + "\n"

    @classmethod
    def from_csv(cls, text: str, name: str = "file", device_of_stage: Sequence[int] | None = None) -> Schedule:
        """Inverse of to_csv(); the place of each stage follows from the lines unless it is given.

        Raises ConfigError for a cell that is not an operation, and for a stage on two devices or on none.
        """
        orders = tuple(tuple(_cells(line, at)) for at, line in enumerate(text.splitlines()) if line.strip())
        found: dict[int, int] = {}
        for device, order in enumerate(orders):
            for op in order:
                if found.setdefault(op.stage, device) != device:
                    raise ConfigError(f"stage {op.stage} runs on devices {found[op.stage]} and {device}: give it one")
        n_stages = max(found, default=-1) + 1
        missing = [stage for stage in range(n_stages) if stage not in found]
        if missing or not n_stages:
            raise ConfigError(f"no device runs stage {missing[0] if missing else 0}: every stage needs one line")
        ops = [op for order in orders for op in order]
        places = tuple(found[stage] for stage in range(n_stages)) if device_of_stage is None else tuple(device_of_stage)
        n_microbatches = max(op.microbatch for op in ops) + 1
        return cls(name, places, n_microbatches, orders, max(op.part for op in ops) + 1)


def _cells(line: str, number: int) -> Iterable[Op]:
    for column, cell in enumerate(line.split(",")):
        try:
            if cell.strip():
                yield Op.parse(cell)
        except ConfigError as error:
            raise ConfigError(f"line {number + 1}, column {column + 1}: {error}") from None


def straight(n_devices: int) -> tuple[int, ...]:
    """device_of_stage of a pipeline with one stage on each device."""
    return tuple(range(n_devices))


def loop(n_devices: int, chunks: int) -> tuple[int, ...]:
    """device_of_stage when stages go round the devices `chunks` times (interleaved 1F1B)."""
    return tuple(range(n_devices)) * chunks


def wave(n_devices: int) -> tuple[int, ...]:
    """device_of_stage when stages go to the last device and back (ZB-V, CrossPipe's Wave)."""
    return (*range(n_devices), *reversed(range(n_devices)))
