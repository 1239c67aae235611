"""The buffers behind one state tensor each: where its rows lie, what a row copy must move, what the graph is bound to.

All of them keep rows 0 .. n - 1 contiguous, so that the graph can be bound to the first n by pointer and shape. The
kinds differ in what is alive in a row: all of it (`RowBuffer`), a prefix of one axis that the graph reads by length
(`PrefixBuffer`), or a prefix of the source axis that the graph reads whole (`SourceBuffer`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.core.errors import BundleError
from serving.core.state_spec import SOURCE, TIME, Role, StateSpec, StateTensor

FEW = 8  # rows that are copied faster one by one than by an index array

Array = NDArray[Any]
Index = tuple[Any, ...]
SOURCE_BUCKET = 32  # kernels sum in vectors: with extents of this multiple, added zeros change no sum


def bucket(length: int) -> int:
    """The smallest multiple of SOURCE_BUCKET that holds `length` positions, at least one."""
    return max(1, -(-length // SOURCE_BUCKET)) * SOURCE_BUCKET


def address(array: Array) -> int:
    """Where the array's data begins."""
    return int(array.__array_interface__["data"][0])


class Buffer(ABC):
    """Room for `rows` rows of one state tensor."""

    def __init__(self, tensor: StateTensor, rows: int, source: int, time: int) -> None:
        self.name = tensor.name
        self.dtype = np.dtype(tensor.dtype)
        self.shape = tensor.shape(rows, source, time)
        self.array = np.zeros(self.shape, self.dtype)  # pages that no row has reached yet take no memory
        self.base = address(self.array)

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def pointer(self, first: int) -> int:
        """Address of row `first`."""
        return self.base + first * self.row_bytes

    @abstractmethod
    def copy(self, to: Sequence[int], source: Sequence[int], live: int) -> None:
        """Copy rows; no row is both read and written. `live` positions along the prefix axis are filled."""

    @abstractmethod
    def write(self, first: int, values: Array) -> None:
        """Fill the rows from `first` on with `values` (row, ...), whose prefix axis may be shorter."""


class RowBuffer(Buffer):
    """Rows without an axis that grows."""

    def copy(self, to: Sequence[int], source: Sequence[int], live: int) -> None:
        self.array[to] = self.array[source]

    def write(self, first: int, values: Array) -> None:
        self.array[first : first + len(values)] = values


class PrefixBuffer(Buffer):
    """Rows of which the graph reads only the first positions along `axis`, by each row's own length."""

    def __init__(self, tensor: StateTensor, rows: int, source: int, time: int, axis: int) -> None:
        super().__init__(tensor, rows, source, time)
        self.lead: Index = (slice(None),) * (axis - 1)  # between the row axis and the prefix axis
        self.axis = axis

    def copy(self, to: Sequence[int], source: Sequence[int], live: int) -> None:
        prefix: Index = (*self.lead, slice(live))
        if len(to) > FEW:
            self.array[(to, *prefix)] = self.array[(source, *prefix)]
            return
        for one, other in zip(to, source, strict=True):
            self.array[(one, *prefix)] = self.array[(other, *prefix)]

    def write(self, first: int, values: Array) -> None:
        self.array[(slice(first, first + len(values)), *self.lead, slice(values.shape[self.axis]))] = values


class SourceBuffer(Buffer):
    """Rows that the graph reads over the whole source axis: kept short, and zero beyond each row's own length.

    The rows lie `extent` positions apart in one flat array, and move when the extent changes.
    """

    def __init__(self, tensor: StateTensor, rows: int, source: int, time: int, axis: int) -> None:
        super().__init__(tensor, rows, bucket(source), time)
        self.lead: Index = (slice(None),) * (axis - 1)
        self.axis = axis
        self.flat = self.array.reshape(-1)
        self.extent = self.shape[axis]
        self.resize(0, SOURCE_BUCKET)

    def resize(self, rows: int, extent: int) -> None:
        """Lay the first `rows` rows out with `extent` positions, none of which may cut a live one off."""
        old = self.array
        shape = (*self.shape[: self.axis], extent, *self.shape[self.axis + 1 :])
        new = self.flat[: math.prod(shape)].reshape(shape)
        kept: Index = (*self.lead, slice(min(extent, self.extent)))
        # Growing rows move towards the end, so the last one goes first; each passes through a copy.
        for row in range(rows - 1, -1, -1) if extent > self.extent else range(rows):
            moved = old[(row, *kept)].copy()
            new[row] = 0
            new[(row, *kept)] = moved
        self.array, self.shape, self.extent = new, shape, extent

    def copy(self, to: Sequence[int], source: Sequence[int], live: int) -> None:
        self.array[to] = self.array[source]  # the padding must come along, and the extent is short

    def write(self, first: int, values: Array) -> None:
        rows, length = slice(first, first + len(values)), values.shape[self.axis]
        self.array[(rows, *self.lead, slice(length))] = values
        self.array[(rows, *self.lead, slice(length, None))] = 0


class DoubleBuffer:
    """Rows that each step replaces: it reads one buffer and writes the other, then they change places."""

    def __init__(self, current: Buffer, other: Buffer) -> None:
        self.name = current.name
        self.current, self.other = current, other

    def swap(self) -> None:
        """What was written is read from now on."""
        self.current, self.other = self.other, self.current

    def resize(self, rows: int, extent: int) -> None:
        """Lay both out with `extent` source positions, where they have any."""
        for buffer, held in ((self.current, rows), (self.other, 0)):
            if isinstance(buffer, SourceBuffer):
                buffer.resize(held, extent)


def make_buffer(tensor: StateTensor, by_length: bool, rows: int, source: int, time: int) -> Buffer:
    """The buffer that a tensor needs; `by_length`: the step reads its source axis by each row's own length."""
    if tensor.axes.count(SOURCE) > 1:
        raise BundleError(f"state {tensor.name!r}: more than one source axis is not supported")
    time_axis, source_axis = tensor.axis(TIME), tensor.axis(SOURCE)
    if time_axis is not None:
        return PrefixBuffer(tensor, rows, source, time, time_axis)
    if source_axis is None:
        return RowBuffer(tensor, rows, source, time)
    if by_length:
        return PrefixBuffer(tensor, rows, source, time, source_axis)
    return SourceBuffer(tensor, rows, source, time, source_axis)


def bytes_a_row(spec: StateSpec, source: int, time: int) -> int:
    """Bytes that the state of one row takes at its longest."""
    twice = sum(tensor.row_bytes(bucket(source), time) for tensor in spec.of(Role.RECURRENT))  # double-buffered
    return spec.row_bytes(bucket(source), time) + twice
