"""Several engines on one opened bundle: what one thread decodes at a time, several decode side by side.

Graphs of small models do not scale inside an operator, so more processors are used by more engines of one thread
each. They share the sessions, hence the weights; each has its own rows. A job goes to the engine with the fewest rows
to decode, the first of them when they have equally few, so that a lone caller always finds warm caches.
"""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from types import TracebackType

from serving.core.errors import Overloaded
from serving.core.manifest import Bundle
from serving.engine import processors
from serving.engine.engine import Engine
from serving.engine.jobs import Job
from serving.engine.observer import Guarded, Observer, Silent, Snapshot
from serving.engine.sessions import Stages
from serving.engine.settings import DEFAULT_MEMORY, EngineSettings


class Pool:
    """Engines of one bundle, used as one. Every method may be called from any thread."""

    def __init__(
        self,
        bundle: Bundle,
        stages: Stages,
        settings: EngineSettings | None = None,
        observer: Observer | None = None,
        workers: int = 1,
    ) -> None:
        """Allocate everything; nothing runs before `start`.

        Args:
            settings: `rows` are those of each engine; queue and memory are shared by all.
            observer: called from the threads of all engines.
            workers: engines.

        Raises:
            BundleError: the graphs do not fit the bundle's state.
            ConfigError: the memory allowed does not hold one row of each engine.
        """
        self.bundle, self.stages = bundle, stages
        self.settings = settings or EngineSettings()
        self._observer = Guarded(observer or Silent())
        each = replace(self.settings, memory_bytes=(self.settings.memory_bytes or DEFAULT_MEMORY) // workers)
        self.engines = [Engine(bundle, stages, each, observer) for _ in range(workers)]
        self.capacity = min(engine.capacity for engine in self.engines)  # rows that one job may take
        self._lock = threading.Lock()
        self._refused = 0

    def start(self) -> None:
        """Start every engine.

        Raises:
            BundleError: a graph fails.
            Unavailable: the pool was started before.
        """
        for engine in self.engines:
            engine.start()

    def submit(self, job: Job) -> None:
        """Queue a job; its `on_done` is called once, unless this raises.

        Raises:
            InvalidInput, Unsupported, Unavailable: as `Engine.submit`.
            Overloaded: the queue is full.
        """
        with self._lock:  # or two callers would take the last place
            waiting = sum(engine.waiting for engine in self.engines)
            full = waiting >= self.settings.queue
            if not full:
                min(self.engines, key=lambda engine: engine.load).submit(job)
                return
            self._refused += 1
        error = Overloaded(f"{waiting} jobs are waiting, as many as may; try again later")
        self._observer.rejected(job, error)
        raise error

    def cancel(self, job: Job) -> None:
        """Give a job up, see `Engine.cancel`."""
        for engine in self.engines:
            engine.cancel(job)

    def stop(self, grace_seconds: float = 0.0) -> bool:
        """Stop every engine at once, see `Engine.stop`; returns whether all jobs finished."""
        finished: list[bool] = []
        threads = [
            threading.Thread(target=lambda engine=engine: finished.append(engine.stop(grace_seconds)))
            for engine in self.engines
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return all(finished)

    def snapshot(self) -> Snapshot:
        """The sum over the engines; what adds up in each of them adds up in the sum."""
        with self._lock:  # a job that is being refused is counted on both sides or on none
            parts = [engine.snapshot() for engine in self.engines]
            refused = self._refused
        total = {field.name: sum(getattr(part, field.name) for part in parts) for field in fields(Snapshot)}
        total["received"] += refused
        total["rejected"] += refused
        return Snapshot(**total | {"accepting": all(part.accepting for part in parts)})

    def __enter__(self) -> Pool:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def share_out(workers: int = 0, threads: int = 0) -> tuple[int, int]:
    """Workers and threads of each: what is 0 follows from the processors and the other; both 0: a worker each."""
    usable = processors.usable()
    if not workers:
        workers = max(1, usable // max(1, threads))
    return workers, threads or max(1, usable // workers)
