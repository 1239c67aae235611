"""Decoding with the PyTorch model, by the same search that serves it. For development sets, not for speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from serving.core.search import Search, SearchTask, start_search
from serving.core.types import Hypothesis, SearchOptions
from training.batching import pad
from training.models.base import Model, State


@torch.inference_mode()
def decode(
    model: Model,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    batch: int = 64,
    progress: Callable[[int], object] = lambda done: None,
) -> list[list[Hypothesis]]:
    """The hypotheses of each source, in order.

    Args:
        model: in evaluation mode.
        sources: ids without the end symbol; an empty one has the one empty hypothesis [] and runs nothing.
        options: for all sources.
        batch: sources decoded together.
        progress: called with the number of sources done.
    """
    results: list[list[Hypothesis]] = [[] for _ in sources]
    order = sorted((i for i, source in enumerate(sources) if source), key=lambda i: len(sources[i]))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        for index, found in zip(chosen, _decode_batch(model, [sources[i] for i in chosen], options), strict=True):
            results[index] = found
        progress(len(chosen))
    return results


def _decode_batch(model: Model, sources: list[Sequence[int]], options: SearchOptions) -> list[list[Hypothesis]]:
    special, sizes = model.sizes.special, model.sizes
    ended = [[*source, special.eos] for source in sources]
    searches = [start_search(SearchTask(source, options, special, sizes.target_limit)) for source in ended]
    lengths = torch.tensor([len(source) for source in ended], dtype=torch.int32)
    state = model.initial(model.encode(pad(ended, special.pad), lengths))
    state |= model.empty_caches(len(ended), max(search.limit for search in searches) + 1)
    while any(not search.done for search in searches):
        tokens = torch.tensor([token for search in searches for token in search.tokens])  # (row,)
        positions = torch.tensor([s.position for s in searches for _ in s.tokens], dtype=torch.int32)
        logits, updated = model.step(tokens, positions, state)
        state = _reorder({**state, **updated}, _advance(searches, logits))
    return [search.hypotheses() for search in searches]


def _advance(searches: list[Search], logits: Tensor) -> Tensor:
    """Advance every live search; the row each surviving row's state comes from."""
    most = max(search.candidates for search in searches if not search.done)
    scores, tokens = logits.float().log_softmax(-1).topk(min(most, logits.shape[-1]))  # (row, most)
    parents: list[int] = []
    for search, start in _live(searches):
        rows = slice(start, start + search.rows)
        parents.extend(start + parent for parent in search.advance(tokens[rows].numpy(), scores[rows].numpy()))
    return torch.tensor(parents, dtype=torch.int64)


def _live(searches: list[Search]) -> Iterator[tuple[Search, int]]:
    """Live searches with their first row, as laid out before any of them advances."""
    start = 0
    for search, rows in [(search, search.rows) for search in searches]:
        if rows:
            yield search, start
        start += rows


def _reorder(state: State, parents: Tensor) -> State:
    return {name: tensor[parents] for name, tensor in state.items()}
