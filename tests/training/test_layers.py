"""Dropout drops its share, keeps the mean, and is decided by torch's seed."""

from __future__ import annotations

import pytest
import torch

from training.layers import Dropout


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (501, 7, 64)])  # sizes that four numbers to a draw do not divide
def test_values_are_zero_or_scaled(share: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x = torch.full(shape, 2.0, requires_grad=True)
    out = Dropout(share).train()(x)
    kept = out != 0
    assert out.shape == x.shape
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 2 / (1 - share)))
    if out.numel() > 1000:
        assert float(kept.float().mean()) == pytest.approx(1 - share, abs=0.01)
    out.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad, out.detach() / 2)


def test_the_seed_decides_and_each_call_differs() -> None:
    dropout, x = Dropout(0.5).train(), torch.ones(1000)
    torch.manual_seed(2)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(2)
    assert torch.equal(dropout(x), first)
    assert torch.equal(dropout(x), second)
    assert not torch.equal(first, second)


def test_evaluation_and_a_share_of_zero_change_nothing() -> None:
    x = torch.ones(4)
    state = torch.get_rng_state()
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0).train()(x) is x
    assert torch.equal(torch.get_rng_state(), state)
