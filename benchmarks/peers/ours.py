"""fuseq itself: the engine in the worker's process, with the settings that it ships with."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Ids, Peer, Search, Setting, Weights

BUNDLE = "bundle"  # folder of a subject: what is timed ...
EXACT_BUNDLE = "bundle-fp32"  # ... and the same weights unquantized
MOST_WAITING = 1 << 16
PROFILED = 5  # batches


def options_of(search: Search) -> Any:
    """The engine's options for a search that all engines can do."""
    from serving.core.types import SearchOptions

    return SearchOptions(
        beam=search.beam,
        length_penalty=0.0,
        max_length_ratio=0.0,
        max_length_margin=search.limit,
        stop_repetition=False,
        forced_length=search.forced or None,
    )


class Ours(Peer):
    """`Engine.submit`, the engine opened as the server opens it.

    Setting: any of the server's settings (precision, threads, workers, rows, device); left out, its own defaults.
    """

    name = "fuseq"
    package = "fuseq"
    module = "onnxruntime"
    exact = {"bundle": EXACT_BUNDLE, "precision": "fp32"}

    def __init__(self, weights: Weights, setting: Setting) -> None:
        super().__init__(weights, setting)
        from serving.config import Settings
        from serving.metrics import Metrics
        from serving.registry import Registry

        self._steps: list[tuple[int, float]] | None = None  # rows and seconds of each, while somebody wants them

        class Noting(Metrics):
            """Hears of every step, as the server's metrics do."""

            def step_done(noting, rows: int, seconds: float) -> None:
                if self._steps is not None:
                    self._steps.append((rows, seconds))

        # However large a batch is, it finds room to wait: that is a limit of a server, and costs no time.
        chosen = {name: value for name, value in setting.items() if name not in ("bundle", "profile")}
        if "profile" in setting:
            _profile_sessions(setting["profile"])
        self._registry = Registry(Settings(queue=MOST_WAITING, **chosen), Noting())
        self._registry.open([weights.path(setting.get("bundle", BUNDLE))])
        self._model = self._registry.get()
        self._engine = self._model.engine

    @classmethod
    def settings(cls, cores: int, batch: int) -> list[Setting]:
        """Only the defaults: nobody should have to tune it."""
        return [{}]

    def run(self, prepared: Ids, search: Search) -> list[Any]:
        """Submit the batch and wait for its last answer."""
        from serving.core.errors import FuseqError
        from serving.engine.jobs import Job

        options = options_of(search)
        answers: list[Any] = [None] * len(prepared)
        left, lock, done = [len(prepared)], threading.Lock(), threading.Event()

        def put(index: int, outcome: Any) -> None:
            answers[index] = outcome
            with lock:
                left[0] -= 1
                if not left[0]:
                    done.set()

        for index, source in enumerate(prepared):
            self._engine.submit(Job(source, options, partial(put, index)))
        done.wait()
        for answer in answers:
            if isinstance(answer, FuseqError):
                raise answer
        return answers

    def outputs(self, raw: list[Any]) -> Ids:
        return [list(result.hypotheses[0].tokens) for result in raw]

    def files(self) -> list[Path]:
        bundle, precision = self._engine.bundle, self._model.precision
        manifest = bundle.manifest
        names = {*bundle.graphs(precision).graphs.values(), manifest.source_codec.file, manifest.target_codec.file}
        names.update(name for name in manifest.files if precision in name and name.endswith(".bin"))
        return [bundle.path / "manifest.json", *map(bundle.file, names)]

    def close(self) -> None:
        self._registry.stop()

    # What only this engine is asked for.

    def step_times(self, batch: Ids, search: dict[str, Any]) -> dict[str, Any]:
        """Decode a batch; the seconds it took, and rows and seconds of each of its steps."""
        noted = self._steps = []
        _, seconds = self.translate(batch, Search(**search))
        self._steps = None
        return {"seconds": seconds, "steps": noted}

    def join(self, long: Ids, short: list[int], limits: tuple[int, int]) -> dict[str, float]:
        """Seconds of a short sentence that comes while long ones are decoded, and of the long ones (case 59)."""
        from serving.engine.jobs import Job

        begin, waiting = time.perf_counter(), threading.Semaphore(0)
        ended: dict[str, float] = {}
        noted = self._steps = []

        def submit(name: str, source: list[int], forced: int) -> None:
            sent = time.perf_counter()

            def done(outcome: Any) -> None:
                ended[name] = time.perf_counter() - sent
                waiting.release()

            self._engine.submit(Job(source, options_of(Search(forced=forced)), done))

        for index, source in enumerate(long):
            submit(f"long{index}", source, limits[0])
        while not noted and time.perf_counter() - begin < 0.2:
            time.sleep(0.0005)  # until they run
        submit("short", short, limits[1])
        for _ in range(len(long) + 1):
            waiting.acquire()
        self._steps = None
        return {"short": ended.pop("short"), "long": max(ended.values())}

    def profile(self, batch: Ids, search: dict[str, Any]) -> dict[str, dict[str, float]]:
        """Seconds of each operator by stage, from the runtime's own profiler, over some batches.

        The worker must have been opened with the setting `profile`; it can be asked once.
        """
        for _ in range(PROFILED):
            self.translate(batch, Search(**search))
        stages = self._engine.stages
        return {name: _by_operator(getattr(stages, name).end_profiling()) for name in ("encode", "step")}

    def in_flight(self, batch: Ids, search: dict[str, Any], concurrency: int, seconds: float) -> dict[str, Any]:
        """Keep `concurrency` sources of `batch` in the engine for so many seconds.

        Returns:
            tokens generated, sentences answered, the time it took, and resident KiB at the end.
        """
        from benchmarks.worker import status_kib

        loop = _Loop(self._engine, batch, options_of(Search(**search)))
        tokens, sentences, spent = loop.run(concurrency, seconds)
        return {"tokens": tokens, "sentences": sentences, "seconds": spent, "rss_kib": status_kib("VmRSS")}


def _profile_sessions(folder: str) -> None:
    """Let every session that is opened from now on write a profile into `folder`."""
    from serving.engine import sessions

    plain = sessions.session_options

    def profiling(*arguments: Any, **named: Any) -> Any:
        made = plain(*arguments, **named)
        options = made[0] if isinstance(made, tuple) else made
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        return made

    sessions.session_options = profiling


def _by_operator(path: str) -> dict[str, float]:
    """Seconds by operator of a profile: the time in kernels, without what lies between them.

    A node counts with its median time for each of its calls: the first ones allocate, and say nothing of the others.
    """
    nodes: dict[tuple[str, str], list[float]] = {}
    for event in json.loads(Path(path).read_text(encoding="utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            nodes.setdefault((event["args"]["op_name"], event["name"]), []).append(event["dur"] / 1e6)
    found: dict[str, float] = {}
    for (operator, _), times in nodes.items():
        found[operator] = found.get(operator, 0.0) + statistics.median(times) * len(times)
    return found


class _Loop:
    """A closed loop: whoever is answered is replaced at once, from the thread of the engine."""

    def __init__(self, engine: Any, batch: Sequence[Sequence[int]], options: Any) -> None:
        self._engine, self._batch, self._options = engine, batch, options
        self._lock = threading.Lock()
        self._idle = threading.Event()

    def run(self, concurrency: int, seconds: float) -> tuple[int, int, float]:
        """Tokens, sentences and seconds."""
        self._next = self._tokens = self._sentences = 0
        self._left = concurrency
        begin = time.perf_counter()
        self._end = begin + seconds
        for _ in range(concurrency):
            self._submit()
        self._idle.wait()
        return self._tokens, self._sentences, time.perf_counter() - begin

    def _submit(self) -> None:
        from serving.engine.jobs import Job

        with self._lock:
            source = self._batch[self._next % len(self._batch)]
            self._next += 1
        self._engine.submit(Job(source, self._options, self._done))

    def _done(self, outcome: Any) -> None:
        from serving.core.errors import FuseqError

        if not isinstance(outcome, FuseqError):
            with self._lock:  # several engines answer
                self._tokens += len(outcome.hypotheses[0].tokens)
                self._sentences += 1
        if time.perf_counter() < self._end:
            self._submit()
            return
        with self._lock:
            self._left -= 1
            if not self._left:
                self._idle.set()
