"""What a decoder carries from step to step, declared once and obeyed by everyone.

A model declares its state (`Model.state_spec`), export derives graph inputs and outputs from it, the manifest
stores it, the slots allocate and compact by it, and beam search reorders by it. Nobody asks for the architecture.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from serving.core.errors import BundleError

ROW, SOURCE, TIME = "row", "source", "time"
DTYPES = ("float32", "float16", "int32", "int64", "bool")  # what a state tensor may hold


class Role(enum.StrEnum):
    """How a state tensor lives."""

    MEMORY = "memory"  # written once at admission; the beams of a group hold the same; never reordered
    RECURRENT = "recurrent"  # replaced as a whole at each step
    CACHE = "cache"  # grows along `time`, one position a step, updated in place


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the state: `axes` starts with "row"; others are "source", "time" or a fixed size."""

    name: str
    dtype: str
    axes: tuple[str | int, ...]
    role: Role

    def __post_init__(self) -> None:
        if not self.axes or self.axes[0] != ROW:
            raise BundleError(f"state {self.name!r}: the first axis must be {ROW!r}, got {self.axes}")
        unknown = [axis for axis in self.axes[1:] if isinstance(axis, str) and axis not in (SOURCE, TIME)]
        if unknown:
            raise BundleError(f"state {self.name!r}: unknown axes {unknown}; use {SOURCE!r}, {TIME!r} or a size")
        if any(not isinstance(axis, str) and axis < 1 for axis in self.axes):
            raise BundleError(f"state {self.name!r}: sizes of axes must be at least 1, got {self.axes}")
        if self.dtype not in DTYPES:
            raise BundleError(f"state {self.name!r}: unknown type {self.dtype!r}; use one of {', '.join(DTYPES)}")
        if (TIME in self.axes) != (self.role is Role.CACHE):
            raise BundleError(f"state {self.name!r}: a {TIME!r} axis and the role {Role.CACHE!r} go together")

    def shape(self, rows: int, source: int, time: int) -> tuple[int, ...]:
        """The tensor's shape for `rows` rows, `source` source positions and `time` decoder positions."""
        sizes = {ROW: rows, SOURCE: source, TIME: time}
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)

    def axis(self, name: str) -> int | None:
        """Position of the named axis, None where the tensor has none."""
        return self.axes.index(name) if name in self.axes else None

    def row_bytes(self, source: int, time: int) -> int:
        """Bytes that one row takes."""
        return math.prod(self.shape(1, source, time)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The whole state of a decoder, in graph order."""

    tensors: tuple[StateTensor, ...]

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise BundleError(f"state tensors must have different names; twice: {twice}")

    def __iter__(self) -> Iterator[StateTensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def of(self, *roles: Role) -> tuple[StateTensor, ...]:
        """The tensors of the given roles, in order."""
        return tuple(tensor for tensor in self.tensors if tensor.role in roles)

    def row_bytes(self, source: int, time: int) -> int:
        """Bytes that one row takes over all tensors."""
        return sum(tensor.row_bytes(source, time) for tensor in self.tensors)
