"""One contender in a process of its own: its memory is its own, and so are its threads and its Python.

Reads one JSON object a line from standard input and answers with one a line on standard output. Runs on Python 3.10
too. The parent's side is `benchmarks.contenders`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from benchmarks.peers import find_peer
from benchmarks.peers.base import Ids, Peer, Search, Weights

MOST_SAID = 300  # characters of an error: some hold a whole tensor


def status_kib(field: str) -> int:
    """A field of /proc/self/status in KiB: VmRSS is resident memory, VmHWM its peak."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field + ":"))


class Worker:
    """Answers requests with a peer."""

    def __init__(self) -> None:
        self._peer: Peer | None = None
        self._batches: list[Ids] = []
        self._turn = 0

    @property
    def peer(self) -> Peer:
        """The open peer."""
        assert self._peer is not None, "nothing is open"
        return self._peer

    def open(self, peer: str, weights: dict[str, Any], setting: dict[str, Any]) -> dict[str, Any]:
        """Load a subject's weights at a setting."""
        self._peer = find_peer(peer)(Weights(**weights), setting)
        return {"disk_bytes": self._peer.disk_bytes()}

    def load(self, batches: list[Ids]) -> dict[str, Any]:
        """Keep batches for `run`, so that they do not travel each time."""
        self._batches, self._turn = batches, 0
        return {}

    def run(self, search: dict[str, Any]) -> dict[str, Any]:
        """Translate the next of the loaded batches; after the last comes the first."""
        batch = self._batches[self._turn % len(self._batches)]
        self._turn += 1
        ids, seconds = self.peer.translate(batch, Search(**search))
        return {"seconds": seconds, "tokens": sum(map(len, ids)), "sentences": len(batch)}

    def outputs(self, search: dict[str, Any]) -> Ids:
        """The target ids of all loaded batches, one after the other."""
        return [row for batch in self._batches for row in self.peer.translate(batch, Search(**search))[0]]

    def memory(self) -> dict[str, Any]:
        """Resident memory of this process."""
        return {"rss_kib": status_kib("VmRSS"), "peak_kib": status_kib("VmHWM")}

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """Something that only this peer can do."""
        return getattr(self.peer, method)(**arguments)


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries that print must not disturb the answers
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(worker, request.pop("op"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_SAID]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if worker._peer is not None:
        worker.peer.close()


if __name__ == "__main__":
    main()
