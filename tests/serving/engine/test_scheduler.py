"""Decisions of the scheduler, without graphs, threads or a clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.errors import Cancelled, DeadlineExceeded
from serving.core.search import SearchTask, start_search
from serving.core.types import SearchOptions, SpecialIds
from serving.engine.jobs import Group, Job
from serving.engine.scheduler import WINDOW, Executed, Plan, Scheduler


def group(length: int = 3, beam: int = 1, deadline: float | None = None, align: bool = False) -> Group:
    job = Job((5,) * length, SearchOptions(beam=beam), lambda outcome: None, align=align, deadline=deadline)
    return Group(job, start_search(SearchTask(job.source, job.options, SpecialIds(), 64)), queued_at=0.0)


def scheduler(rows: int = 8, encode_tokens: int = 100, bypass: int = 5) -> Scheduler:
    return Scheduler(rows, encode_tokens, bypass)


def admitted(plan: Plan) -> list[Group]:
    return [group for groups in plan.encode for group in groups]


def finish(scheduler: Scheduler, *groups: Group) -> None:
    scheduler.update(Executed(finished=list(groups)))
    for done in groups:
        scheduler.answered(done)


def test_a_lone_group_starts_at_once() -> None:
    s, lone = scheduler(), group()
    s.add(lone)
    plan = s.schedule(1.0)
    assert plan.encode == [[lone]]
    assert plan.step
    assert lone.started_at == 1.0
    assert not s.schedule(1.1).encode


def test_an_empty_scheduler_plans_nothing() -> None:
    plan = scheduler().schedule(0.0)
    assert (plan.answers, plan.leave, plan.encode, plan.step) == ([], [], [], False)


def test_each_encoder_call_holds_one_length() -> None:
    s = scheduler(rows=20)
    groups = [group(length) for length in (3, 5, 3, 7, 5, 3)]
    for one in groups:
        s.add(one)
    assert [[g.length for g in call] for call in s.schedule(0.0).encode] == [[3, 3, 3], [5, 5], [7]]


def test_admission_stops_at_the_token_budget_but_takes_one_source_however_long() -> None:
    s = scheduler(encode_tokens=10)
    groups = [group(length) for length in (40, 4, 4, 4, 1)]
    for one in groups:
        s.add(one)
    assert admitted(s.schedule(0.0)) == groups[:1]
    assert admitted(s.schedule(0.0)) == groups[1:3]
    assert admitted(s.schedule(0.0)) == groups[3:]


def test_a_beam_reserves_all_the_rows_that_it_can_grow_to() -> None:
    s = scheduler(rows=8)
    beams = [group(beam=4) for _ in range(3)]
    for beam in beams:
        s.add(beam)
    assert admitted(s.schedule(0.0)) == beams[:2]
    assert s.reserved == 8
    finish(s, beams[0])
    assert admitted(s.schedule(0.0)) == beams[2:]


def test_rows_that_fail_or_leave_are_free_again() -> None:
    s = scheduler(rows=8)
    failing, leaving = group(beam=4), group(beam=4)
    s.add(failing)
    s.add(leaving)
    s.schedule(0.0)
    s.update(Executed(failed=[(failing, Cancelled("x"))]))
    s.cancel(leaving)
    assert [g for g, _ in s.schedule(0.0).leave] == [leaving]
    assert (s.reserved, s.idle) == (0, True)


def test_a_large_group_is_passed_a_bounded_number_of_times() -> None:
    s = scheduler(rows=8, bypass=5)
    running = group()
    s.add(running)
    s.schedule(0.0)
    large = group(beam=8)
    s.add(large)
    passed = 0
    for _ in range(100):
        small = group(beam=2)
        s.add(small)
        taken = admitted(s.schedule(0.0))
        if small not in taken:
            break
        passed += 1
        finish(s, small)
    assert passed == 5
    finish(s, running)
    assert admitted(s.schedule(0.0)) == [large]


def test_equal_lengths_come_along_but_pass_nobody_for_ever() -> None:
    s = scheduler(rows=1, bypass=5)
    odd = group(9)
    s.add(group(3))
    s.add(odd)
    for _ in range(WINDOW):
        s.add(group(3))
    turns = 0
    while odd not in s.running:
        finish(s, *s.running)
        s.schedule(0.0)
        turns += 1
    assert turns <= 7


@pytest.mark.parametrize("where", ["waiting", "running", "finishing"])
@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_case_64_case_65_whoever_is_given_up_is_out_of_the_next_plan(where: str, how: str) -> None:
    s = scheduler(rows=1)
    one = group(deadline=10.0 if how == "expired" else None)
    if where == "waiting":
        s.add(group())
        s.schedule(0.0)
    s.add(one)
    s.schedule(1.0)
    if where == "finishing":
        s.update(Executed(finished=[one]))
    if how == "cancelled":
        s.cancel(one)
    early = s.schedule(9.9)
    late = s.schedule(10.0)
    ended = early if how == "cancelled" else late
    [(given_up, error)] = ended.leave if where == "running" else ended.answers
    assert given_up is one
    assert isinstance(error, Cancelled if how == "cancelled" else DeadlineExceeded)
    assert not (early if ended is late else late).answers
    for held in (s.waiting, s.running, s.finishing):
        assert one not in held


def test_case_65_what_has_expired_never_starts() -> None:
    s = scheduler()
    expired, fine = group(deadline=1.0), group(deadline=3.0)
    s.add(expired)
    s.add(fine)
    plan = s.schedule(2.0)
    assert admitted(plan) == [fine]
    assert [g for g, _ in plan.answers] == [expired]
    assert s.next_deadline == 3.0


def test_cancelling_twice_or_too_late_does_no_harm() -> None:
    s, one = scheduler(), group()
    s.cancel(one)
    assert s.schedule(0.0) == Plan([], [], [], False)
    s.add(one)
    s.cancel(one)
    s.cancel(one)
    assert len(s.schedule(0.0).answers) == 1
    assert s.schedule(0.0) == Plan([], [], [], False)


requests = st.lists(
    st.tuples(
        st.integers(0, 2),  # turns after the request before it
        st.integers(1, 30),  # source length
        st.sampled_from([1, 1, 2, 4, 8]),  # beam
        st.integers(1, 6),  # turns that it runs for
        st.one_of(st.none(), st.integers(0, 60)),  # deadline
        st.booleans(),  # cancelled a turn after it came
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(requests, st.integers(8, 20), st.integers(1, 60), st.integers(1, 10))
def test_every_group_is_run_or_given_up_once_and_rows_are_never_overdrawn(
    requests: list[tuple[int, int, int, int, int | None, bool]], rows: int, tokens: int, bypass: int
) -> None:
    s = scheduler(rows, tokens, bypass)
    arrivals: dict[int, list[Group]] = {}
    cancellations: dict[int, list[Group]] = {}
    left: dict[Group, int] = {}
    now = 0
    for gap, length, beam, turns, deadline, cancelled in requests:
        now += gap
        one = group(length, beam, deadline)
        left[one] = turns
        arrivals.setdefault(now, []).append(one)
        cancellations.setdefault(now + 1, []).extend([one] if cancelled else [])
    ended: list[Group] = []
    started: list[Group] = []
    for turn in range(now + 7 * len(requests) + 2):
        for one in arrivals.get(turn, []):
            s.add(one)
        for one in cancellations.get(turn, []):
            s.cancel(one)
        plan = s.schedule(float(turn))
        assert s.reserved == sum(one.rows_reserved for one in s.running) <= rows
        assert plan.step == bool(s.running)
        if len(admitted(plan)) > 1:
            assert sum(one.length for one in admitted(plan)) <= tokens
        started += admitted(plan)
        ended += [one for one, _ in plan.answers + plan.leave]
        done = []
        for one in s.running:
            left[one] -= 1
            done += [one] if left[one] == 0 else []
        ended += done
        finish(s, *done)
    assert s.idle
    assert sorted(map(id, ended)) == sorted(map(id, left))
    assert len(set(map(id, started))) == len(started)
    assert s.reserved == 0
    assert max((one.passed_by for one in left), default=0) <= bypass + rows


def test_what_comes_faster_than_alignments_are_drawn_stays_in_the_queue() -> None:
    s = scheduler(rows=2)
    wanting = [group(align=True) for _ in range(5)]
    for one in wanting:
        s.add(one)
    assert admitted(s.schedule(1.0)) == wanting[:2]
    s.update(Executed(finished=wanting[:2]))  # decoded, and waiting for their alignments
    assert s.idle  # with nothing else to do the engine sleeps
    assert not admitted(s.schedule(2.0))
    other = group()
    s.add(other)
    assert not s.idle
    assert admitted(s.schedule(3.0)) == [other]  # who needs none is not held up, nor counted as passing
    assert [one.passed_by for one in wanting[2:]] == [0, 0, 0]
    finish(s, other)
    s.answered(wanting[0])
    assert not s.idle
    assert admitted(s.schedule(4.0)) == wanting[2:4]
