"""The rows of a running batch: state preallocated from the StateSpec, kept compact, moved as little as possible.

Rows 0 .. n - 1 are live after `settle`. A group's rows may lie anywhere among them, in any order. What a step's
search results ask for is gathered first (`reorder`, `release`) and then done at once, one operation per tensor:
rows whose parent changed, then the last rows into the holes that leaving rows left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from serving.core.errors import ConfigError
from serving.core.state_spec import Role, StateSpec
from serving.engine.buffers import Array, Buffer, DoubleBuffer, SourceBuffer, bucket, bytes_a_row, make_buffer
from serving.engine.jobs import Group

MEBIBYTE = 1 << 20


class Slots:
    """State for `capacity` rows."""

    def __init__(
        self, spec: StateSpec, *, rows: int, memory_bytes: int, source: int, time: int, by_length: frozenset[str]
    ) -> None:
        """Allocate.

        Args:
            rows: as many rows as are wanted.
            memory_bytes: what they may take; fewer rows are allocated where they would take more.
            source, time: the longest source and the most decoder positions of a row.
            by_length: names of the memory tensors whose source axis the step reads by each row's own length.

        Raises:
            ConfigError: not even one row fits.
        """
        a_row = bytes_a_row(spec, source, time)
        self.capacity = min(rows, memory_bytes // a_row)
        if self.capacity < 1:
            raise ConfigError(f"a row's state takes {a_row / MEBIBYTE:.1f} MiB; allow more memory for the engine")
        self.memory: list[Buffer] = []
        self.caches: list[Buffer] = []
        self.recurrent: list[DoubleBuffer] = []
        for tensor in spec:
            count = 2 if tensor.role is Role.RECURRENT else 1
            made = [make_buffer(tensor, tensor.name in by_length, self.capacity, source, time) for _ in range(count)]
            if tensor.role is Role.RECURRENT:
                self.recurrent.append(DoubleBuffer(*made))
            else:
                (self.caches if tensor.role is Role.CACHE else self.memory).append(made[0])
        self._sourced = [buffer for buffer in self.memory if isinstance(buffer, SourceBuffer)]
        self._has_extent = bool(self._sourced) or any(isinstance(d.current, SourceBuffer) for d in self.recurrent)
        self.extent = bucket(0)  # source positions that source buffers are laid out for
        self.parity = 0  # which of the two arrays of recurrent tensors is read next
        self.count = 0  # rows in use, holes included until `settle`
        self.owners: list[Group] = []  # of each row
        self.tokens: list[int] = []  # each row takes next
        self.positions = np.zeros(self.capacity, np.int32)  # of those tokens; so many cache positions are filled
        self.lengths = np.zeros(self.capacity, np.int32)  # of the sources
        self._holes: list[int] = []
        self._moves: tuple[list[int], list[int]] = ([], [])  # (to, from) within a group: only its state differs
        self._copies: tuple[list[int], list[int]] = ([], [])  # (to, from): everything is copied
        self._deepest = 0  # position of the group furthest on that moves rows

    def admit(self, groups: Sequence[Group], encoded: Mapping[str, Array]) -> None:
        """Give each group its first row. `encoded` holds the memory and recurrent tensors, a row a group."""
        first, length = self.count, groups[0].length
        rows = slice(first, first + len(groups))
        self.positions[rows] = 0
        self.lengths[rows] = length
        self.count += len(groups)
        self._fit(max(self.extent, bucket(length)), first)
        for buffer in (*self.memory, *(double.current for double in self.recurrent)):
            buffer.write(first, encoded[buffer.name])
        for row, group in enumerate(groups, first):
            group.slots = [row]
            self.owners.append(group)
            self.tokens.append(group.search.tokens[0])

    def fit(self) -> None:
        """Lay source-axis buffers out as tightly as the live rows allow."""
        if self._has_extent:
            self._fit(bucket(int(self.lengths[: self.count].max(initial=0))), self.count)

    def _fit(self, extent: int, rows: int) -> None:
        if not self._has_extent or extent == self.extent:
            return
        for buffer in self._sourced:
            buffer.resize(rows, extent)
        for double in self.recurrent:
            double.resize(rows, extent)
        self.extent = extent

    def stepped(self) -> None:
        """A step was run on all rows: their state is one position further."""
        self.positions[: self.count] += 1
        if self.recurrent:
            for double in self.recurrent:
                double.swap()
            self.parity ^= 1

    def reorder(self, group: Group, parents: Sequence[int]) -> None:
        """The group's row i continues from what was its row `parents[i]`; fewer or more rows than before are fine."""
        old, tokens = group.slots, group.search.tokens
        new: list[int] = []
        kept: set[int] = set()
        for parent in parents:  # the first child of each parent stays where the parent is
            new.append(-1 if parent in kept else old[parent])
            kept.add(parent)
        dead = [slot for index, slot in enumerate(old) if index not in kept]
        if len(kept) < len(parents):
            self._deepest = max(self._deepest, group.search.position)
            for child, slot in enumerate(new):
                if slot < 0:
                    source = old[parents[child]]
                    new[child] = self._reuse(dead, source) if dead else self._grow(group, source)
        self._holes.extend(dead)
        group.slots = new
        for slot, token in zip(new, tokens, strict=True):
            self.tokens[slot] = token

    def _reuse(self, dead: list[int], source: int) -> int:
        slot = dead.pop()
        self._moves[0].append(slot)
        self._moves[1].append(source)
        return slot

    def _grow(self, group: Group, source: int) -> int:
        if self._holes:
            slot = self._holes.pop()
            self.owners[slot] = group
        else:
            slot = self.count
            self.count += 1
            self.owners.append(group)
            self.tokens.append(0)
        self._copies[0].append(slot)
        self._copies[1].append(source)
        return slot

    def release(self, group: Group) -> None:
        """The group's rows are free."""
        self._holes.extend(group.slots)
        group.slots = []

    def settle(self) -> None:
        """Do what was gathered; afterwards the live rows are 0 .. count - 1."""
        if self._moves[0]:
            self._copy_state(*self._moves, filled=self._deepest)
            self._moves = ([], [])
        if self._copies[0]:
            self._copy_all(*self._copies)
            self._copies = ([], [])
        self._deepest = 0
        if self._holes:
            self._fill_holes()

    def _fill_holes(self) -> None:
        """Move the last rows into the holes before them."""
        remaining = self.count - len(self._holes)
        holes = set(self._holes)
        to = [hole for hole in self._holes if hole < remaining]
        last = [row for row in range(remaining, self.count) if row not in holes]
        for slot, row in zip(to, last, strict=True):
            group = self.owners[row]
            group.slots[group.slots.index(row)] = slot
            self.owners[slot] = group
            self.tokens[slot] = self.tokens[row]
        if to:
            self._copy_all(to, last)
        self._holes = []
        del self.owners[remaining:], self.tokens[remaining:]
        self.count = remaining

    def _copy_state(self, to: list[int], source: list[int], filled: int) -> None:
        """Copy what differs between the rows of a group; `filled` cache positions at most."""
        for buffer in self.caches:
            buffer.copy(to, source, filled)
        for double in self.recurrent:
            double.current.copy(to, source, filled)

    def _copy_all(self, to: list[int], source: list[int]) -> None:
        self.positions[to] = self.positions[source]
        self.lengths[to] = self.lengths[source]
        self._copy_state(to, source, int(self.positions[to].max()))
        length = int(self.lengths[to].max())
        for buffer in self.memory:
            buffer.copy(to, source, length)

    def clear(self) -> None:
        """Forget every row."""
        for group in self.owners:
            group.slots = []
        self.owners, self.tokens, self.count = [], [], 0
        self._holes, self._moves, self._copies, self._deepest = [], ([], []), ([], []), 0
