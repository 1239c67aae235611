"""Many inputs through a bounded window, answers in the order of the inputs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from serving.core.errors import FuseqError

T = TypeVar("T")
R = TypeVar("R")


def in_order(
    items: Iterable[T], submit: Callable[[T], Future[R]], window: int = 64
) -> Iterator[tuple[T, R | FuseqError]]:
    """Yield each item with its answer, or with the FuseqError it ended in, as soon as those before it are out.

    `items` is read and submitted by a thread of its own, so a slow source delays no answer; at most `window`
    answers are awaited or wait to be yielded. Any other error, of `items` too, is raised where it belongs in the
    order.
    """
    pending: queue.Queue[tuple[T, Future[R]] | BaseException | None] = queue.Queue(maxsize=window)
    abandoned = threading.Event()

    def put(entry: tuple[T, Future[R]] | BaseException | None) -> None:
        while not abandoned.is_set():
            try:
                pending.put(entry, timeout=0.2)
            except queue.Full:
                continue
            return

    def read() -> None:
        try:
            for item in items:
                if abandoned.is_set():
                    return
                try:
                    future = submit(item)
                except FuseqError as error:
                    future = Future()
                    future.set_exception(error)
                put((item, future))
        except BaseException as error:
            put(error)
        else:
            put(None)

    threading.Thread(target=read, name="fuseq-reader", daemon=True).start()
    try:
        while (entry := pending.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            item, future = entry
            outcome: R | FuseqError
            try:
                outcome = future.result()
            except FuseqError as error:
                outcome = error
            yield item, outcome
    finally:
        abandoned.set()
