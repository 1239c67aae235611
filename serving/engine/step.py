"""The step graph bound to the slots: one call decodes one position of every live row."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.core.errors import BundleError
from serving.core.state_spec import Role, StateSpec
from serving.engine.buffers import address
from serving.engine.sessions import Graph
from serving.engine.slots import Slots

MOST_BINDINGS = 1024

Candidates = tuple[list[list[int]], list[list[float]]]  # ids and log-probabilities of each row, best first


def read_by_length(spec: StateSpec, graph: Graph) -> frozenset[str]:
    """Memory that the step writes back in place: its operator indexes it by each row's length, never by the extent."""
    written = {port.name for port in graph.get_outputs()}
    return frozenset(tensor.name for tensor in spec.of(Role.MEMORY) if f"next.{tensor.name}" in written)


def check_step(spec: StateSpec, graph: Graph) -> None:
    """Refuse a step graph that does not fit the state.

    Raises:
        BundleError: an input or output is missing or unknown.
    """
    names = {tensor.name for tensor in spec}
    inputs = {port.name for port in graph.get_inputs()}
    outputs = {port.name for port in graph.get_outputs()}
    if unknown := inputs - names - {"tokens", "positions", "k"}:
        raise BundleError(f"the step graph has inputs that the state does not name: {sorted(unknown)}")
    needed = {f"next.{tensor.name}" for tensor in spec.of(Role.RECURRENT, Role.CACHE)} | {"top_tokens", "top_scores"}
    if missing := needed - outputs:
        raise BundleError(f"the step graph lacks the outputs {sorted(missing)}")
    if unknown := outputs - needed - {f"next.{tensor.name}" for tensor in spec.of(Role.MEMORY)}:
        raise BundleError(f"the step graph has outputs that the state does not name: {sorted(unknown)}")


class Step:
    """Runs the step graph on the slots' own buffers; nothing is copied but tokens and candidates.

    Bindings are kept, since making one costs as much as a small step: one for each row count (and number of
    candidates, source extent, and side of the double buffers), the least recently used forgotten.
    """

    def __init__(self, graph: Graph, slots: Slots) -> None:
        self._graph = graph
        self._slots = slots
        self._inputs = {port.name for port in graph.get_inputs()}
        self._outputs = {port.name for port in graph.get_outputs()}
        self._tokens = np.zeros(slots.capacity, np.int64)
        self._k = np.zeros(1, np.int64)
        self._top: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}  # by k
        self._bindings: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def run(self, k: int) -> Candidates:
        """Decode every live row; each gets its `k` best continuations. The slots are then one position further."""
        self._call(0, self._slots.count, k)
        return self._candidates(0, self._slots.count, k)

    def run_apart(self, k: int) -> tuple[Candidates, dict[int, Exception]]:
        """As `run`, but row by row: after a failed call, to find the rows that made it fail.

        Calling again does no harm: caches get the same values at the same place, and recurrent state is read from
        the side that was not written. A failed row's candidates are empty.
        """
        ids: list[list[int]] = []
        scores: list[list[float]] = []
        failures: dict[int, Exception] = {}
        for row in range(self._slots.count):
            try:
                self._call(row, 1, k)
            except Exception as error:  # the runtime's own exceptions share no base class below this
                failures[row] = error
                ids.append([])
                scores.append([])
                continue
            row_ids, row_scores = self._candidates(row, 1, k)
            ids += row_ids
            scores += row_scores
        return (ids, scores), failures

    def _call(self, first: int, rows: int, k: int) -> None:
        slots = self._slots
        key = (first, rows, k, slots.extent, slots.parity)
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = self._bind(first, rows, k)
            if len(self._bindings) > MOST_BINDINGS:
                self._bindings.popitem(last=False)
        else:
            self._bindings.move_to_end(key)
        self._tokens[first : first + rows] = slots.tokens[first : first + rows]
        self._k[0] = k
        self._graph.run_with_iobinding(binding)

    def _candidates(self, first: int, rows: int, k: int) -> Candidates:
        tokens, scores = self._top[k]
        return tokens[first : first + rows].tolist(), scores[first : first + rows].tolist()

    def _bind(self, first: int, rows: int, k: int) -> Any:
        """Bind rows `first` .. `first + rows - 1` of every buffer, caches and written memory in place."""
        slots, binding = self._slots, self._graph.io_binding()
        if k not in self._top:
            self._top[k] = (np.zeros((slots.capacity, k), np.int64), np.zeros((slots.capacity, k), np.float32))

        def give(name: str, dtype: Any, shape: tuple[int, ...], pointer: int) -> None:
            if name in self._inputs:  # a graph need not use all it is offered
                binding.bind_input(name, "cpu", 0, dtype, shape, pointer)

        def take(name: str, dtype: Any, shape: tuple[int, ...], pointer: int) -> None:
            if name in self._outputs:
                binding.bind_output(name, "cpu", 0, dtype, shape, pointer)

        give("tokens", np.int64, (rows,), address(self._tokens) + first * self._tokens.itemsize)
        give("positions", np.int32, (rows,), address(slots.positions) + first * slots.positions.itemsize)
        give("k", np.int64, (1,), address(self._k))
        tokens, scores = self._top[k]
        take("top_tokens", np.int64, (rows, k), address(tokens) + first * k * tokens.itemsize)
        take("top_scores", np.float32, (rows, k), address(scores) + first * k * scores.itemsize)
        for buffer in (*slots.memory, *slots.caches):
            shape = (rows, *buffer.shape[1:])
            give(buffer.name, buffer.dtype, shape, buffer.pointer(first))
            take(f"next.{buffer.name}", buffer.dtype, shape, buffer.pointer(first))
        for double in slots.recurrent:
            shape = (rows, *double.current.shape[1:])
            give(double.name, double.current.dtype, shape, double.current.pointer(first))
            take(f"next.{double.name}", double.other.dtype, shape, double.other.pointer(first))
        return binding
