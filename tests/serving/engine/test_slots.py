"""Slots against a plain model of what they hold: whatever is moved, every row keeps its own state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.errors import BundleError, ConfigError
from serving.core.search import Search, SearchTask, start_search
from serving.core.state_spec import Role, StateSpec, StateTensor
from serving.core.types import SearchOptions, SpecialIds
from serving.engine.buffers import Array, Buffer, PrefixBuffer, RowBuffer, SourceBuffer, bucket, make_buffer
from serving.engine.jobs import Group, Job
from serving.engine.slots import Slots

SPEC = StateSpec(
    (
        StateTensor("keys", "float32", ("row", 2, "time", 3), Role.CACHE),
        StateTensor("cross", "float32", ("row", 2, "source", 3), Role.MEMORY),  # read by length
        StateTensor("memory", "float32", ("row", "source", 3), Role.MEMORY),
        StateTensor("late", "float32", ("row", 2, "source"), Role.MEMORY),
        StateTensor("bag", "float32", ("row", 3), Role.MEMORY),
        StateTensor("length", "int32", ("row",), Role.MEMORY),
        StateTensor("hidden", "float32", ("row", 3), Role.RECURRENT),
        StateTensor("coverage", "float32", ("row", "source"), Role.RECURRENT),
    )
)
SOURCE, TIME = 100, 40


def make_slots(rows: int = 12) -> Slots:
    return Slots(SPEC, rows=rows, memory_bytes=1 << 30, source=SOURCE, time=TIME, by_length=frozenset({"cross"}))


def group(length: int, beam: int) -> Group:
    job = Job((5,) * length, SearchOptions(beam=beam), lambda outcome: None)
    return Group(job, start_search(SearchTask(job.source, job.options, SpecialIds(), TIME)), queued_at=0.0)


def encoded(groups: list[Group], stamps: list[float]) -> dict[str, Array]:
    """What an encoder gives: every number of a group's rows is its stamp."""
    length = groups[0].length
    return {
        tensor.name: np.array([np.full(tensor.shape(1, length, TIME)[1:], stamp) for stamp in stamps], tensor.dtype)
        for tensor in SPEC.of(Role.MEMORY, Role.RECURRENT)
    }


class Mirror:
    """Does to plain Python lists what the slots do to their buffers."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.stamps: dict[Group, float] = {}
        self.histories: dict[Group, list[list[float]]] = {}  # what each row's cache holds, a number a position
        self.clock = 1.0

    def admit(self, groups: list[Group]) -> None:
        stamps = []
        for one in groups:
            self.clock += 1
            self.stamps[one] = self.clock
            self.histories[one] = [[]]
            stamps.append(self.clock)
        self.slots.admit(groups, encoded(groups, stamps))

    def step(self) -> None:
        """What the graph does: write a number into each row's cache at its position and into its next state."""
        slots = self.slots
        for one, histories in self.histories.items():
            for row, history in zip(one.slots, histories, strict=True):
                self.clock += 1
                slots.caches[0].array[row, :, slots.positions[row]] = self.clock
                for double in slots.recurrent:
                    double.other.array[row] = self.clock
                history.append(self.clock)
        slots.stepped()

    def reorder(self, one: Group, parents: list[int]) -> None:
        one.search.tokens = [100 + i for i in range(len(parents))]
        one.search.position = len(self.histories[one][0])
        self.slots.reorder(one, parents)
        self.histories[one] = [list(self.histories[one][parent]) for parent in parents]

    def release(self, one: Group) -> None:
        self.slots.release(one)
        del self.histories[one]

    def check(self) -> None:
        slots = self.slots
        rows = [row for one in self.histories for row in one.slots]
        assert sorted(rows) == list(range(slots.count))
        assert len(slots.owners) == len(slots.tokens) == slots.count
        cross, memory, late, bag, length = slots.memory
        hidden, coverage = (double.current for double in slots.recurrent)
        for one, histories in self.histories.items():
            stamp, n = self.stamps[one], one.length
            assert [slots.tokens[row] for row in one.slots] == one.search.tokens
            for row, history in zip(one.slots, histories, strict=True):
                assert slots.owners[row] is one
                assert slots.positions[row] == len(history)
                assert slots.lengths[row] == n
                assert (slots.caches[0].array[row, :, : len(history)] == np.array(history)[:, None]).all()
                assert (cross.array[row, :, :n] == stamp).all()
                assert (memory.array[row, :n] == stamp).all()
                assert (memory.array[row, n:] == 0).all()
                assert (late.array[row, :, :n] == stamp).all()
                assert (late.array[row, :, n:] == 0).all()
                assert (bag.array[row] == stamp).all()
                assert length.array[row] == stamp
                assert (hidden.array[row] == (history[-1] if history else stamp)).all()
                assert (coverage.array[row, :n] == (history[-1] if history else stamp)).all()


def draw_parents(data: st.DataObject, held: int, beam: int) -> list[int]:
    return data.draw(st.lists(st.integers(0, held - 1), min_size=1, max_size=beam), label="parents")


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_row_keeps_its_own_state_whatever_moves(data: st.DataObject) -> None:
    slots = make_slots()
    mirror = Mirror(slots)
    for _ in range(data.draw(st.integers(1, 14), label="turns")):
        reserved = sum(one.rows_reserved for one in mirror.histories)
        for _ in range(data.draw(st.integers(0, 2), label="admissions")):
            length = data.draw(st.integers(1, SOURCE), label="length")
            beams = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3), label="beams")
            groups = [group(length, beam) for beam in beams]
            reserved += sum(one.rows_reserved for one in groups)
            if reserved > slots.capacity:
                break
            mirror.admit(groups)
        slots.fit()
        mirror.check()
        longest = max((one.length for one in mirror.histories), default=0)
        assert slots.extent == bucket(longest)
        mirror.step()
        for one in list(mirror.histories):
            if data.draw(st.integers(0, 4), label="leaves") == 0:
                mirror.release(one)
            else:
                mirror.reorder(one, draw_parents(data, len(one.slots), one.rows_reserved))
        slots.settle()
        mirror.check()
    slots.clear()
    assert slots.count == 0


def copied(buffer: Buffer, moves: list[tuple[list[int], list[int]]]) -> None:
    plain = buffer.copy

    def copy(to: list[int], source: list[int], live: int) -> None:
        moves.append((list(to), list(source)))
        plain(to, source, live)

    buffer.copy = copy  # type: ignore[method-assign, assignment]


def test_only_rows_whose_parent_changed_are_copied_and_memory_never_within_a_group() -> None:
    slots = make_slots()
    mirror = Mirror(slots)
    one, other = group(9, 4), group(9, 1)
    mirror.admit([one, other])
    mirror.step()
    mirror.reorder(one, [0, 0, 0, 0])
    slots.settle()
    assert sorted([*one.slots, *other.slots]) == [0, 1, 2, 3, 4]
    caches: list[tuple[list[int], list[int]]] = []
    memory: list[tuple[list[int], list[int]]] = []
    copied(slots.caches[0], caches)
    for buffer in slots.memory:
        copied(buffer, memory)
    before = list(one.slots)
    mirror.step()
    mirror.reorder(one, [1, 3, 3, 0])  # the row of 2 is dead: the second child of 3 takes it
    slots.settle()
    assert caches == [([before[2]], [before[3]])]
    assert memory == []
    assert one.slots == [before[1], before[3], before[2], before[0]]
    mirror.check()


def test_a_hole_is_filled_by_the_last_row() -> None:
    slots = make_slots()
    mirror = Mirror(slots)
    groups = [group(4, 1) for _ in range(5)]
    mirror.admit(groups)
    mirror.release(groups[1])
    slots.settle()
    assert [one.slots for one in groups] == [[0], [], [2], [3], [1]]
    mirror.check()


def test_growing_rows_take_holes_before_new_rows() -> None:
    slots = make_slots()
    mirror = Mirror(slots)
    leaving, growing = group(4, 1), group(4, 2)
    mirror.admit([leaving, growing])
    mirror.step()
    mirror.release(leaving)
    mirror.reorder(growing, [0, 0])
    slots.settle()
    assert growing.slots == [1, 0]
    mirror.check()


def test_the_extent_follows_the_longest_live_source_in_buckets() -> None:
    slots = make_slots()
    mirror = Mirror(slots)
    short, long = group(5, 1), group(70, 1)
    mirror.admit([short])
    assert slots.extent == 32
    mirror.admit([long])
    assert slots.extent == 96
    mirror.check()
    mirror.release(long)
    slots.settle()
    slots.fit()
    assert slots.extent == 32
    mirror.check()


def test_memory_limits_the_rows() -> None:
    a_row = SPEC.row_bytes(128, TIME) + 12 + 4 * 128  # recurrent tensors twice
    for rows in (1, 5):
        slots = Slots(SPEC, rows=50, memory_bytes=rows * a_row, source=SOURCE, time=TIME, by_length=frozenset())
        assert slots.capacity == rows
    with pytest.raises(ConfigError, match="MiB; allow more memory"):
        Slots(SPEC, rows=50, memory_bytes=a_row - 1, source=SOURCE, time=TIME, by_length=frozenset())


def test_each_tensor_gets_the_buffer_it_needs() -> None:
    kinds = {t.name: type(make_buffer(t, t.name == "cross", 2, SOURCE, TIME)) for t in SPEC}
    assert kinds == {
        "keys": PrefixBuffer,
        "cross": PrefixBuffer,
        "memory": SourceBuffer,
        "late": SourceBuffer,
        "bag": RowBuffer,
        "length": RowBuffer,
        "hidden": RowBuffer,
        "coverage": SourceBuffer,
    }
    square = StateTensor("square", "float32", ("row", "source", "source"), Role.MEMORY)
    with pytest.raises(BundleError, match="'square'"):
        make_buffer(square, False, 2, SOURCE, TIME)


@pytest.mark.parametrize(("length", "extent"), [(0, 32), (1, 32), (32, 32), (33, 64), (500, 512)])
def test_buckets(length: int, extent: int) -> None:
    assert bucket(length) == extent


def test_search_is_the_owner_of_tokens() -> None:
    """The slots read tokens from the search, so both must speak of the same rows."""
    search: Search = group(3, 1).search
    assert search.tokens == [SpecialIds().bos]
