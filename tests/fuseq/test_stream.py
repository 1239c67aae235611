"""Many inputs through a bounded window."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseq.stream import in_order
from serving.core.errors import FuseqError, InvalidInput


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5))
def test_order_and_count_are_kept_however_long_each_takes(delays: list[int], window: int) -> None:
    with ThreadPoolExecutor(4) as pool:

        def submit(delay: int) -> Future[int]:
            return pool.submit(lambda: time.sleep(delay / 1000) or delay)  # type: ignore[func-returns-value]

        assert list(in_order(delays, submit, window)) == [(delay, delay) for delay in delays]


def test_no_more_than_the_window_is_in_flight() -> None:
    started: list[Future[int]] = []

    def submit(number: int) -> Future[int]:
        started.append(Future())
        return started[-1]

    stream = in_order(range(100), submit, window=4)
    threading.Timer(0.3, lambda: started[0].set_result(7)).start()
    assert next(stream) == (0, 7)
    assert len(started) <= 4 + 3  # the window, the one yielded, one waiting to enter, one just let in
    stream.close()


def test_an_answer_is_out_while_the_source_still_waits() -> None:
    more = threading.Event()

    def source() -> Iterator[str]:
        yield "first"
        assert more.wait(10)
        yield "second"

    def submit(text: str) -> Future[str]:
        done: Future[str] = Future()
        done.set_result(text.upper())
        return done

    stream = in_order(source(), submit)
    assert next(stream) == ("first", "FIRST")
    more.set()
    assert list(stream) == [("second", "SECOND")]


def test_errors_of_ours_are_answers_and_others_are_raised() -> None:
    def submit(number: int) -> Future[int]:
        if number == 1:
            raise InvalidInput("refused at once")
        future: Future[int] = Future()
        if number == 2:
            future.set_exception(FuseqError("failed later"))
        elif number == 4:
            future.set_exception(KeyError("a fault"))
        else:
            future.set_result(number)
        return future

    stream = in_order(range(9), submit)
    found = [next(stream)[1] for _ in range(4)]
    assert [str(answer) for answer in found] == ["0", "refused at once", "failed later", "3"]
    with pytest.raises(KeyError):
        next(stream)


def test_a_fault_of_the_source_comes_after_the_answers_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    def submit(number: int) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(number)
        return future

    stream = in_order(source(), submit)
    assert next(stream) == (1, 1)
    with pytest.raises(OSError, match="gone"):
        next(stream)
