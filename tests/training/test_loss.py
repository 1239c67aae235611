"""The loss equals its formula, and padding is not there for it."""

from __future__ import annotations

import math

import pytest
import torch

from training.loss import cross_entropy

PAD = 0


def batch(rows: int = 3, target: int = 5, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, target, vocabulary, generator=generator) * 3
    labels = torch.randint(1, vocabulary, (rows, target), generator=generator)
    labels[0, 2:] = PAD
    labels[2, 4:] = PAD
    return logits, labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_the_loss_is_its_formula(smoothing: float) -> None:
    logits, labels = batch()
    total, count = 0.0, 0
    for row in range(3):
        for t in range(5):
            if (label := int(labels[row, t])) == PAD:
                continue
            values = logits[row, t].tolist()
            log_sum = math.log(sum(math.exp(value) for value in values))
            log_probabilities = [value - log_sum for value in values]
            spread = -sum(log_probabilities) / len(values)
            total += (1 - smoothing) * -log_probabilities[label] + smoothing * spread
            count += 1
    loss, counted = cross_entropy(logits, labels, PAD, smoothing)
    assert counted == count == 2 + 5 + 4
    assert float(loss) == pytest.approx(total / count, rel=1e-5)


def test_padding_changes_neither_loss_nor_gradient() -> None:
    logits, labels = batch()
    loss, count = cross_entropy(logits, labels, PAD, 0.1)
    noisy = logits.clone()
    noisy[labels == PAD] = 1e4
    noisy.requires_grad_()
    noisy_loss, noisy_count = cross_entropy(noisy, labels, PAD, 0.1)
    assert (float(noisy_loss.detach()), noisy_count) == (float(loss), count)
    noisy_loss.backward()  # type: ignore[no-untyped-call]
    assert noisy.grad is not None
    assert float(noisy.grad[labels == PAD].abs().sum()) == 0.0
    assert float(noisy.grad[labels != PAD].abs().min()) > 0.0


def test_half_precision_logits_are_summed_in_single() -> None:
    logits, labels = batch()
    half, _ = cross_entropy(logits.bfloat16(), labels, PAD, 0.1)
    single, _ = cross_entropy(logits.bfloat16().float(), labels, PAD, 0.1)
    assert half.dtype == torch.float32
    assert torch.equal(half, single)
