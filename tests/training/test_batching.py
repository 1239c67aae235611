"""Batches hold every pair once an epoch, in an order that depends on seed and epoch, within the budget."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.core.types import SpecialIds
from training.batching import Batches, IdPair, make_batch, pad

LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=60)


def pairs_of(lengths: list[tuple[int, int]]) -> list[IdPair]:
    """A pair of each two lengths."""
    return [([5] * source, [6] * target) for source, target in lengths]


@given(LENGTHS, st.integers(16, 200), st.integers(1, 80), st.integers(0, 5), st.integers(0, 3))
def test_every_pair_once_an_epoch_and_within_the_budget(
    lengths: list[tuple[int, int]], tokens: int, pool: int, seed: int, epoch: int
) -> None:
    batches = Batches(pairs_of(lengths), tokens, pool, seed).epoch(epoch)
    assert sorted(int(index) for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        widest = max(max(lengths[index]) + 1 for index in batch)
        assert len(batch) == 1 or widest * len(batch) <= tokens


@given(LENGTHS, st.integers(0, 5), st.integers(0, 3))
def test_the_order_depends_on_seed_and_epoch_only(lengths: list[tuple[int, int]], seed: int, epoch: int) -> None:
    np.random.seed(epoch)  # what else draws random numbers does not matter
    one = Batches(pairs_of(lengths), 64, 30, seed)
    one.epoch(epoch + 1)
    other = Batches(pairs_of(lengths), 64, 30, seed)
    torch.manual_seed(seed)
    for first, second in zip(one.epoch(epoch), other.epoch(epoch), strict=True):
        assert np.array_equal(first, second)


def test_epochs_and_seeds_differ() -> None:
    pairs = pairs_of([(n % 13, n % 7) for n in range(200)])
    orders = [
        tuple(int(i) for batch in Batches(pairs, 64, 100, seed).epoch(epoch) for i in batch)
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert len(set(orders)) == 3


def test_lengths_in_a_batch_are_similar() -> None:
    pairs = pairs_of([(int(n), int(n)) for n in np.random.default_rng(0).integers(1, 40, 2000)])
    batches = Batches(pairs, 400, 2000, 0).epoch(0)
    real = sum(len(pairs[i][0]) + 1 for batch in batches for i in batch)
    padded = sum(len(batch) * max(len(pairs[i][0]) + 1 for i in batch) for batch in batches)
    assert padded < 1.05 * real
    longest = [max(len(pairs[i][0]) for i in batch) for batch in batches]
    assert longest != sorted(longest)  # the batches themselves are shuffled


def test_a_batch_has_control_symbols_and_padding_in_their_places() -> None:
    batch = make_batch([([5, 6], [7]), ([8], [9, 10, 11])], SpecialIds(pad=0, bos=1, eos=2, unk=3))
    assert batch.source.tolist() == [[5, 6, 2], [8, 2, 0]]
    assert batch.lengths.tolist() == [3, 2]
    assert batch.target.tolist() == [[1, 7, 0, 0], [1, 9, 10, 11]]
    assert batch.labels.tolist() == [[7, 2, 0, 0], [9, 10, 11, 2]]
    assert batch.tokens == 3 + 2 + 2 + 4
    assert (batch.source.dtype, batch.lengths.dtype) == (torch.int64, torch.int32)


def test_padding_to_the_longest() -> None:
    assert pad([[1], [2, 3, 4], []], 9).tolist() == [[1, 9, 9], [2, 3, 4], [9, 9, 9]]
