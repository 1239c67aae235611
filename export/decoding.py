"""Reference decoding with the exported graphs: the plainest loop around the search, to measure and to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from export.sessions import Array, Sessions
from serving.core.search import Search, SearchTask, start_search
from serving.core.state_spec import Role, StateSpec
from serving.core.types import Hypothesis, SearchOptions, SpecialIds


def decode(
    sessions: Sessions,
    spec: StateSpec,
    special: SpecialIds,
    positions: int,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    batch: int = 32,
    progress: Callable[[int], object] = lambda done: None,
) -> list[list[Hypothesis]]:
    """The hypotheses of each source, in order.

    Args:
        sessions: the graphs.
        spec: the decoder's state.
        special: control symbols.
        positions: decoder positions that the model has.
        sources: ids, end symbol included; none empty.
        options: for all sources.
        batch: sources decoded together.
        progress: called with the number of sources just done.
    """
    results: list[list[Hypothesis]] = [[] for _ in sources]
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        searches = [start_search(SearchTask(sources[i], options, special, positions)) for i in chosen]
        _run(sessions, spec, special, [sources[i] for i in chosen], searches)
        for index, search in zip(chosen, searches, strict=True):
            results[index] = search.hypotheses()
        progress(len(chosen))
    return results


def _run(
    sessions: Sessions, spec: StateSpec, special: SpecialIds, sources: list[Sequence[int]], searches: list[Search]
) -> None:
    """Run the searches of one batch to their ends."""
    lengths = np.array([len(source) for source in sources], np.int32)
    padded = np.full((len(sources), lengths.max()), special.pad, np.int64)
    for row, source in enumerate(sources):
        padded[row, : len(source)] = source
    state = sessions.encode(padded, lengths)
    time = max(search.limit + len(search.prefix) for search in searches) + 1
    for tensor in spec.of(Role.CACHE):
        state[tensor.name] = np.zeros(tensor.shape(len(sources), 0, time), tensor.dtype)
    while any(not search.done for search in searches):
        tokens = np.array([token for search in searches for token in search.tokens], np.int64)
        positions = np.array([s.position for s in searches for _ in s.tokens], np.int32)
        k = max(search.candidates for search in searches if not search.done)
        best, scores, replaced = sessions.step(tokens, positions, k, state)
        parents = _advance(searches, best, scores)
        state = {name: array[parents] for name, array in (state | replaced).items()}


def _advance(searches: list[Search], best: Array, scores: Array) -> list[int]:
    """Advance every live search; the row that each surviving row's state comes from."""
    parents: list[int] = []
    start = 0
    for search, rows in [(search, search.rows) for search in searches]:
        if rows:
            part = slice(start, start + rows)
            parents.extend(start + parent for parent in search.advance(best[part], scores[part].astype(np.float32)))
        start += rows
    return parents
