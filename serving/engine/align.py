"""Alignments of finished hypotheses, by forced decoding through the align graph, off the step path.

A thread of its own runs the graph, so one caller's wish for alignments never delays another's step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from serving.core.errors import FuseqError, ModelFailure
from serving.core.manifest import Manifest
from serving.core.types import Hypothesis
from serving.engine.jobs import Group
from serving.engine.sessions import Graph

Aligned = list[Hypothesis] | FuseqError


class Aligner:
    """Draws the alignments of groups whose search has ended."""

    def __init__(self, graph: Graph, manifest: Manifest, on_aligned: Callable[[Group, Aligned], None]) -> None:
        """`on_aligned` is called from the aligner's thread, once for each group that was added."""
        self._graph = graph
        self._bos = manifest.special.bos
        self._positions = manifest.limits.target
        self._on_aligned = on_aligned
        self._queue: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, group: Group) -> None:
        """Draw this group's alignments, after those added before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fuseq-align", daemon=True)
            self._thread.start()
        self._queue.put(group)

    def stop(self) -> None:
        """End the thread once it has done what was added before."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def align(self, source: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Attention over the source of each token and of the end symbol, (target, source).

        Where the tokens take every decoder position that the model has, the row of the end symbol is missing.
        """
        target = np.array([[self._bos, *tokens][: self._positions]], np.int64)  # (1, target)
        feed = {
            "source": np.array([source], np.int64),  # (1, source)
            "lengths": np.array([len(source)], np.int32),
            "target": target,
        }
        drawn: NDArray[np.float32] = self._graph.run(["alignment"], feed)[0][0]
        return drawn

    def _run(self) -> None:
        while (group := self._queue.get()) is not None:
            self._on_aligned(group, self._aligned(group))

    def _aligned(self, group: Group) -> Aligned:
        if group.answered:  # cancelled or expired meanwhile
            return []
        source = group.job.source
        try:
            return [replace(h, alignment=self.align(source, h.tokens)) for h in group.search.hypotheses()]
        except Exception as error:  # the runtime's own exceptions share no base class below this
            return ModelFailure(f"the align graph failed: {' '.join(str(error).split())}")
