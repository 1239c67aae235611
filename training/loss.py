"""Losses."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, pad: int, smoothing: float) -> tuple[Tensor, int]:
    """Label-smoothed cross-entropy (Szegedy et al. 2016, section 7), mean over real positions.

    Args:
        logits: (batch, target, vocabulary).
        labels: (batch, target); `pad` is not counted.

    Returns:
        The mean loss in nats, and the number of positions counted.
    """
    real = labels != pad  # (batch, target)
    loss = F.cross_entropy(logits[real].float(), labels[real], label_smoothing=smoothing)
    return loss, int(real.sum())
