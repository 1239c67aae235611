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


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "target"), [(1, 1), (3, 5), (90, 7)])  # 630 positions: more than one chunk
def test_loss_and_gradient_equal_torchs(rows: int, target: int, smoothing: float) -> None:
    logits, labels = batch(max(rows, 3), max(target, 5))
    logits, labels = logits[:rows, :target], labels[:rows, :target]
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, _ = cross_entropy(ours, labels, PAD, smoothing)
    (loss * 3).backward()  # type: ignore[no-untyped-call]
    real = labels != PAD
    expected = torch.nn.functional.cross_entropy(theirs[real], labels[real], label_smoothing=smoothing)
    (expected * 3).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[[0.0, 1e4, -1e4], [0.0, -1e4, 1e4]]], requires_grad=True)
    loss, _ = cross_entropy(logits, torch.tensor([[1, 1]]), PAD, 0.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(1e4)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[[0.0, 0, 0], [0, -0.5, 0.5]]]))


def test_a_second_backward_is_refused_not_wrong() -> None:
    logits, labels = batch()
    loss, _ = cross_entropy(logits.requires_grad_(), labels, PAD, 0.1)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()  # type: ignore[no-untyped-call]
