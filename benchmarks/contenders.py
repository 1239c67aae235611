"""The parent's side of `benchmarks.worker`: a contender is a peer at a setting, running in a process of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers import PEERS, find_peer
from benchmarks.peers.base import Ids, Search, Setting, Weights
from serving.core.errors import FuseqError, MissingDependency

ROOT = Path(__file__).resolve().parent.parent
OTHER_PYTHON = "FUSEQ_BENCH_PYTHON_"  # + the peer's name in capitals: the interpreter that has the peer
PATIENCE = 900.0  # seconds that one answer may take


class ContenderFailed(FuseqError):
    """A contender ended, or could not do what was asked."""


def interpreter(peer: str) -> str:
    """The Python that runs a peer: this one, unless the environment names another."""
    return os.environ.get(OTHER_PYTHON + peer.upper().replace("-", "_")) or sys.executable


def installed(peer: str) -> bool:
    """Whether a peer can be run here."""
    python = interpreter(peer)
    module = find_peer(peer).module
    if python == sys.executable:
        return importlib.util.find_spec(module) is not None
    check = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", check], capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


def require_installed(peer: str) -> None:
    """Say what is missing.

    Raises:
        MissingDependency: the peer's package is not there.
    """
    if not installed(peer):
        raise MissingDependency(f"{find_peer(peer).package} is not installed; run: pip install 'fuseq[bench]'")


def version_of(peer: str) -> str:
    """Version of the peer's package, "" where it cannot be told."""
    package = find_peer(peer).package
    script = f"import importlib.metadata as m; print(m.version({package!r}))"
    if interpreter(peer) == sys.executable:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # fuseq, run from its sources
            from fuseq import __version__

            return __version__ if package == "fuseq" else ""
    done = subprocess.run([interpreter(peer), "-c", script], capture_output=True, text=True)
    return done.stdout.strip()


class Contender:
    """A peer at a setting with a subject's weights. Its process works only while it is asked."""

    def __init__(self, peer: str, weights: Weights, setting: Setting, cpus: Sequence[int]) -> None:
        """Start the process and load the weights.

        Raises:
            ContenderFailed: the peer cannot be loaded.
        """
        assert peer in PEERS
        self.peer, self.setting = peer, setting
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **setting.get("env", {})}
        self._process = subprocess.Popen(
            [interpreter(peer), "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        os.sched_setaffinity(self._process.pid, cpus)  # before any library counts the processors
        self._said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        values = {key: value for key, value in setting.items() if key != "env"}
        try:
            opened = self._ask("open", peer=peer, weights=weights.to_json(), setting=values)
        except BaseException:
            self.close()
            raise
        self.disk_bytes: int = opened["disk_bytes"]
        self._tokens = self._sentences = 0  # of all runs

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said = [*self._said[-20:], line.rstrip()]

    def _ask(self, op: str, patience: float = PATIENCE, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(patience, self._process.kill)
        watchdog.start()
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            said = next((text for text in reversed(self._said) if text), "it said nothing")
            raise ContenderFailed(f"{self.peer} {self.setting} ended: {said}")
        answer = json.loads(line)
        if "error" in answer:
            raise ContenderFailed(f"{self.peer} {self.setting}: {answer['error']}")
        return answer["ok"]

    def load(self, *batches: Ids) -> None:
        """Hand over the batches that `run` translates in turn."""
        self._ask("load", batches=list(batches))

    def run(self, search: Search, patience: float = PATIENCE) -> float:
        """Translate the next batch; the seconds it took.

        Raises:
            ContenderFailed: it failed, or took longer than `patience` seconds, which ends the process.
        """
        answer = self._ask("run", patience, search=search.to_json())
        self._tokens += answer["tokens"]
        self._sentences += answer["sentences"]
        return float(answer["seconds"])

    @property
    def tokens_per_sentence(self) -> float:
        """Target tokens of a sentence, over all runs."""
        return self._tokens / self._sentences if self._sentences else 0.0

    def outputs(self, search: Search) -> Ids:
        """Translate all loaded batches; the target ids."""
        found: Ids = self._ask("outputs", search=search.to_json())
        return found

    def memory(self) -> tuple[int, int]:
        """Resident and peak resident KiB of its process."""
        answer = self._ask("memory")
        return answer["rss_kib"], answer["peak_kib"]

    def call(self, method: str, **arguments: Any) -> Any:
        """A method of this peer alone."""
        return self._ask("call", method=method, arguments=arguments)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._listener.join()
        self._process.stdout.close()
        self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
