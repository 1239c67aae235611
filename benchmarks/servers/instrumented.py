"""`fuseq serve` that knows where its processor time goes, as a module that takes its settings as one JSON argument.

Each part's functions are wrapped with a clock of the thread's own processor time; what a wrapped function calls counts
for the callee. On SIGUSR1 a line with the times so far is added to the file `report`. The wrapping itself costs about
a microsecond a call, which the parts outside ONNX Runtime are charged with.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

# Part -> module, class or "" for a function of the module, and the names that belong to the part.
PARTS: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "codec": (
        ("serving.core.codecs", "SentencePieceCodec", ("encode", "decode", "pieces")),
        ("serving.core.codecs", "VocabularyCodec", ("encode", "decode", "pieces")),
    ),
    "scheduler": (("serving.engine.scheduler", "Scheduler", ("add", "schedule", "update")),),
    "search": (("serving.core.search", "Search", ("advance", "hypotheses")),),
    "slots": (("serving.engine.slots", "Slots", ("admit", "fit", "reorder", "release", "settle", "stepped")),),
    "messages": (("serving.rpc.servicer", "", ("translated", "search_options")),),
}
RUNTIME, LOOP, ENGINE, NATIVE = "onnxruntime", "gRPC and event loop", "engine loop", "native threads"
ENGINE_THREAD = "fuseq-engine"


class Clock:
    """Processor seconds by part, each function without those it calls."""

    def __init__(self) -> None:
        self.by_thread: dict[tuple[str, str], float] = defaultdict(float)
        self._local = threading.local()

    def wrap(self, part: str, function: Any) -> Any:
        """`function`, timed as `part`."""

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            stack = self._local.__dict__.setdefault("stack", [])
            begin = time.thread_time()
            stack.append(0.0)  # seconds of wrapped functions that this one calls
            try:
                return function(*arguments, **named)
            finally:
                spent = time.thread_time() - begin
                inner = stack.pop()
                kind = ENGINE if threading.current_thread().name.startswith(ENGINE_THREAD) else LOOP
                self.by_thread[kind, part] += spent - inner
                if stack:
                    stack[-1] += spent

        return timed

    def snapshot(self) -> dict[str, float]:
        """Processor seconds of the process by part; they add up to all of them."""
        found: dict[str, float] = defaultdict(float)
        for (kind, part), seconds in list(self.by_thread.items()):
            found[part] += seconds
            found[kind] -= seconds  # what is left there is what nothing was wrapped in
        known = 0.0
        for thread in threading.enumerate():
            spent = _thread_seconds(thread.native_id)
            known += spent
            found[ENGINE if thread.name.startswith(ENGINE_THREAD) else LOOP] += spent
        found[NATIVE] = max(0.0, time.process_time() - known)
        return {part: round(seconds, 6) for part, seconds in found.items()}


def _thread_seconds(number: int | None) -> float:
    """Processor seconds of a thread, from the kernel's nanosecond account."""
    try:
        return int(Path(f"/proc/self/task/{number}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9
    except (OSError, IndexError):
        return 0.0


class TimedGraph:
    """A session whose calls are timed; everything else is the session's."""

    def __init__(self, graph: Any, clock: Clock) -> None:
        self._graph = graph
        self.run = clock.wrap(RUNTIME, graph.run)
        self.run_with_iobinding = clock.wrap(RUNTIME, graph.run_with_iobinding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


def instrument(clock: Clock) -> list[str]:
    """Wrap every part; returns those that are not where they are expected, whose time goes to their loop."""
    missing = []
    for part, places in PARTS.items():
        found = 0
        for module, owner, names in places:
            try:
                home = importlib.import_module(module)
                home = getattr(home, owner) if owner else home
            except (ImportError, AttributeError):
                continue
            for name in names:
                if hasattr(home, name):
                    setattr(home, name, clock.wrap(part, getattr(home, name)))
                    found += 1
        if not found:
            missing.append(part)
    registry: Any = importlib.import_module("serving.registry")
    plain = registry.open_stages

    def timed(*arguments: Any, **named: Any) -> Any:
        stages = plain(*arguments, **named)
        wrapped: dict[str, Any] = {stage: TimedGraph(getattr(stages, stage), clock) for stage in ("encode", "step")}
        return dataclasses.replace(stages, **wrapped)

    registry.open_stages = timed
    return missing


def main() -> None:
    """Serve until told to stop."""
    spec = json.loads(sys.argv[1])
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    clock = Clock()
    missing = instrument(clock)

    def report(*_: Any) -> None:
        with open(spec["report"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"parts": clock.snapshot(), "missing": missing}) + "\n")

    signal.signal(signal.SIGUSR1, report)
    from serving.config import Settings
    from serving.rpc.server import run

    settings = Settings(listen=f"127.0.0.1:{spec['port']}", metrics="127.0.0.1:0", log_level="warning")
    run(settings, [Path(spec["weights"]["folder"]) / "bundle"])


if __name__ == "__main__":
    main()
