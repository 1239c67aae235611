"""The encode graph: sources of one length in, memory and first recurrent state out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serving.core.errors import BundleError
from serving.core.state_spec import Role, StateSpec
from serving.engine.buffers import Array
from serving.engine.sessions import Graph


class Encoder:
    """Runs the encode graph. Sources of a call have one length, so there is no padding that could matter."""

    def __init__(self, graph: Graph, spec: StateSpec) -> None:
        """Check and keep the graph.

        Raises:
            BundleError: it lacks an output that the state needs.
        """
        self._graph = graph
        self._names = [tensor.name for tensor in spec.of(Role.MEMORY, Role.RECURRENT)]
        if missing := set(self._names) - {port.name for port in graph.get_outputs()}:
            raise BundleError(f"the encode graph lacks the outputs {sorted(missing)}")

    def run(self, sources: Sequence[Sequence[int]]) -> dict[str, Array]:
        """Encode sources of one length; every array has a row a source."""
        source = np.array(sources, np.int64)  # (row, source)
        lengths = np.full(len(sources), source.shape[1], np.int32)  # (row,)
        outputs = self._graph.run(self._names, {"source": source, "lengths": lengths})
        return dict(zip(self._names, outputs, strict=True))
