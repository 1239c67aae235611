"""Decoding with the PyTorch model, by the same search that serves it. For development sets, not for speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from serving.core.search import Search, SearchTask, start_search
from serving.core.types import Hypothesis, SearchOptions
from training.batching import pad
from training.models.base import Model, State, device_of


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
        model: in evaluation mode, on any device.
        sources: ids without the end symbol; an empty one has no hypotheses and runs nothing.
        options: for all sources.
        batch: sources decoded together.
        progress: called after each batch with the number of sources in it.
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
    special, device = model.sizes.special, device_of(model)
    ended = [[*source, special.eos] for source in sources]
    searches = [start_search(SearchTask(source, options, special, model.sizes.target_limit)) for source in ended]
    lengths = torch.tensor([len(source) for source in ended], dtype=torch.int32, device=device)
    state = model.initial(model.encode(pad(ended, special.pad).to(device), lengths))
    state |= model.empty_caches(len(ended), max(search.limit for search in searches) + 1)
    while any(not search.done for search in searches):
        tokens = torch.tensor([token for search in searches for token in search.tokens], device=device)  # (row,)
        at = [search.position for search in searches for _ in search.tokens]
        logits, updated = model.step(tokens, torch.tensor(at, dtype=torch.int32, device=device), state)
        state = _reorder({**state, **updated}, len(at), _advance(searches, logits))
    return [search.hypotheses() for search in searches]


def _advance(searches: list[Search], logits: Tensor) -> list[int]:
    """Advance every live search; the row that each surviving row's state comes from."""
    most = max(search.candidates for search in searches if not search.done)
    best = logits.float().log_softmax(-1).topk(min(most, logits.shape[-1]))  # (row, most)
    scores, tokens = best.values.cpu().numpy(), best.indices.cpu().numpy()
    parents: list[int] = []
    for search, start in _live(searches):
        rows = slice(start, start + search.rows)
        parents.extend(start + parent for parent in search.advance(tokens[rows], scores[rows]))
    return parents


def _live(searches: list[Search]) -> Iterator[tuple[Search, int]]:
    """Live searches with their first row, as laid out before any of them advances."""
    start = 0
    for search, rows in [(search, search.rows) for search in searches]:
        if rows:
            yield search, start
        start += rows


def _reorder(state: State, rows: int, parents: list[int]) -> State:
    """The state of the rows that live on, in their order."""
    if parents == list(range(rows)):
        return state
    chosen = np.array(parents, np.int64)
    return {name: tensor[torch.from_numpy(chosen).to(tensor.device)] for name, tensor in state.items()}
