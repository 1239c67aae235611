"""Pairs of ids to padded batches of similar lengths, in an order that depends only on seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.core.types import SpecialIds

IdPair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Batch:
    """One padded batch."""

    source: Tensor  # (batch, source) int64, end symbol included
    lengths: Tensor  # (batch,) int32
    target: Tensor  # (batch, target) int64, begin symbol first
    labels: Tensor  # (batch, target) int64, end symbol last; padding where there is nothing to predict
    tokens: int  # real positions of both sides

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        on_device = {name: getattr(self, name).to(device) for name in ("source", "lengths", "target", "labels")}
        return replace(self, **on_device)


def pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Right-padded (batch, longest) int64, on the CPU."""
    longest = max(len(row) for row in rows)
    out = np.full((len(rows), longest), value, np.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return torch.from_numpy(out)


def make_batch(pairs: Sequence[IdPair], special: SpecialIds) -> Batch:
    """Pad pairs of ids (without control symbols) into a batch, on the CPU."""
    sources = [[*source, special.eos] for source, _ in pairs]
    labels = [[*target, special.eos] for _, target in pairs]
    targets = [[special.bos, *target] for _, target in pairs]
    lengths = torch.from_numpy(np.array([len(row) for row in sources], np.int32))
    tokens = sum(map(len, sources)) + sum(map(len, labels))
    return Batch(pad(sources, special.pad), lengths, pad(targets, special.pad), pad(labels, special.pad), tokens)


class Batches:
    """The epochs of a corpus: each a list of index arrays, shuffled anew by (seed, epoch)."""

    def __init__(self, pairs: Sequence[IdPair], tokens: int, pool: int, seed: int) -> None:
        self.source_lengths = np.array([len(source) + 1 for source, _ in pairs])
        self.target_lengths = np.array([len(target) + 1 for _, target in pairs])
        self.tokens, self.pool, self.seed = tokens, pool, seed

    def epoch(self, number: int) -> list[NDArray[np.int64]]:
        """The epoch's batches: pools of random pairs are sorted by length and cut by the token budget."""
        generator = np.random.default_rng((self.seed, number))
        order = generator.permutation(len(self.source_lengths))
        batches: list[NDArray[np.int64]] = []
        for start in range(0, len(order), self.pool):
            pool = order[start : start + self.pool]
            pool = pool[np.lexsort((self.target_lengths[pool], self.source_lengths[pool]))]
            batches.extend(self._cut(pool))
        return [batches[index] for index in generator.permutation(len(batches))]

    def _cut(self, pool: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Slices of `pool` whose padded size stays within the budget; a longer pair is a batch of its own."""
        longest = np.maximum(self.source_lengths[pool], self.target_lengths[pool])
        batches, start, widest = [], 0, 0
        for end, length in enumerate(longest.tolist()):
            width = max(widest, length)
            if end > start and width * (end - start + 1) > self.tokens:
                batches.append(pool[start:end])
                start, width = end, length
            widest = width
        batches.append(pool[start:])
        return batches
