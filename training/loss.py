"""Losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ROWS = 256  # worked on at a time, so that they stay in the cache between the passes


class _SmoothedCrossEntropy(torch.autograd.Function):
    """Weighted sum of label-smoothed cross-entropies; the probabilities are kept, and turned into the gradient.

    With p = softmax(logits) and q = (1 - smoothing) onehot(label) + smoothing / vocabulary, a position's loss is
    log sum exp(logits) - q . logits, and its gradient p - q.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor, smoothing: float) -> Tensor:
        """logits (positions, vocabulary), labels (positions,), weights (positions,)."""
        kept = torch.empty_like(logits, dtype=torch.float32)  # (positions, vocabulary)
        losses = torch.empty_like(weights)
        rows = zip(*(x.split(_ROWS) for x in (kept, logits, labels, losses)), strict=True)
        for probabilities, values, label, loss in rows:
            values = values.float()
            torch.softmax(values, -1, out=probabilities)
            log_sum = values.amax(-1) - probabilities.amax(-1).log()  # the largest probability is never zero
            wanted = values.gather(1, label[:, None])[:, 0]
            loss.copy_(log_sum - (1 - smoothing) * wanted - smoothing * values.mean(-1))
        ctx.kept, ctx.dtype, ctx.smoothing = kept, logits.dtype, smoothing
        ctx.save_for_backward(labels, weights)
        return (losses * weights).sum()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        labels, weights = ctx.saved_tensors
        gradient, ctx.kept = ctx.kept, None
        if gradient is None:
            raise RuntimeError("this loss can be differentiated once: its gradient is written over what it kept")
        scaled = weights * grad
        for rows, label, weight in zip(*(x.split(_ROWS) for x in (gradient, labels, scaled)), strict=True):
            rows.sub_(ctx.smoothing / rows.shape[1]).mul_(weight[:, None])
            rows.scatter_add_(1, label[:, None], (ctx.smoothing - 1) * weight[:, None])
        return gradient.to(ctx.dtype), None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, pad: int, smoothing: float) -> tuple[Tensor, int]:
    """Label-smoothed cross-entropy (Szegedy et al. 2016, section 7), mean over real positions.

    torch's own keeps the log-probabilities, and takes several passes over them more to reach the gradient; with a
    vocabulary of thousands they cost as much as a layer. The gradient can be taken once.

    Args:
        logits: (batch, target, vocabulary).
        labels: (batch, target); `pad` is not counted.

    Returns:
        The mean loss in nats, and the number of positions counted.
    """
    real = labels != pad  # (batch, target)
    count = int(real.sum())
    weights = real.flatten().float() / count
    flat = logits.flatten(0, 1)  # (batch * target, vocabulary)
    return _SmoothedCrossEntropy.apply(flat, labels.flatten(), weights, smoothing), count
