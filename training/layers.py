"""Building blocks that more than one architecture uses. Attention and masks are pure functions of their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import ops

Activation = Literal["relu", "swish", "gelu"]
Layout = Literal["interleaved", "halves"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "swish": F.silu, "gelu": F.gelu}


def sinusoids(length: int, size: int, layout: Layout = "interleaved") -> Tensor:
    """Sinusoidal positions (Vaswani et al. 2017, section 3.5), (length, size).

    Interleaved, as in the paper: even columns sine, odd cosine. Halves: all sines, then all cosines, as in Marian.
    """
    position = torch.arange(length, dtype=torch.float64)[:, None]  # (length, 1)
    rate = torch.exp(torch.arange(0, size, 2, dtype=torch.float64) * (-math.log(10000.0) / size))  # (size / 2,)
    angle = position * rate  # (length, size / 2)
    waves = torch.stack([angle.sin(), angle.cos()], 1)  # (length, 2, size / 2)
    return (waves.transpose(1, 2) if layout == "interleaved" else waves).flatten(1).float()


def real_positions(lengths: Tensor, size: int) -> Tensor:
    """Mask of real positions, (batch, size) bool, from lengths (batch,)."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, positions, heads * size) -> (batch, heads, positions, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(batch, heads, positions, size) -> (batch, positions, heads * size)."""
    return x.transpose(1, 2).flatten(2)


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014, section 4), scaled by 1 / (1 - share) in training.

    torch draws a mask on the CPU number by number, on one core: a twentieth of a training step. Here a fast generator
    fills it, seeded from torch's, so that a seed still decides everything.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.share:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.share)
        seed = int(torch.randint(2**62, ()))
        noise = np.random.SFC64(seed).random_raw(-(-x.numel() // 4)).view(np.int16)  # four to a drawn number
        kept = torch.from_numpy(noise)[: x.numel()].view(x.shape) >= round(self.share * 2**16) - 2**15
        return x * kept.to(x.dtype).mul_(1 / (1 - self.share))


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2.2) with one packed projection for q, k and v."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.packed = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Attend over x (batch, positions, size).

        With `live` (batch, positions) every position sees the live ones; without, only itself and earlier ones.
        """
        # (batch, heads, positions, d) each
        q, k, v = (split_heads(part, self.heads) for part in self.packed(x).chunk(3, -1))
        if live is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=live[:, None, None, :])
        return self.out(merge_heads(attended))

    def step(self, x: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One new position per row: x (row, size), caches (row, heads, time, d), positions (row,)."""
        q, k, v = self.packed(x).chunk(3, -1)  # (row, size) each
        attended, keys, values = ops.cached_attention(q, k, v, keys, values, positions)
        return self.out(attended), keys, values


class CrossAttention(nn.Module):
    """Multi-head attention over encoder states; keys and values are projected once per source."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(size, size)
        self.packed = nn.Linear(size, 2 * size)
        self.out = nn.Linear(size, size)

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (batch, heads, source, d) of memory (batch, source, size)."""
        k, v = self.packed(memory).chunk(2, -1)  # (batch, source, size)
        return split_heads(k, self.heads), split_heads(v, self.heads)

    def forward(self, x: Tensor, memory: Tensor, live: Tensor) -> Tensor:
        """x (batch, target, size) over memory (batch, source, size) where live (batch, source)."""
        q = split_heads(self.query(x), self.heads)  # (batch, heads, target, d)
        k, v = self.project(memory)
        return self.out(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=live[:, None, None, :])))

    def weights(self, x: Tensor, memory: Tensor, live: Tensor) -> Tensor:
        """Attention weights averaged over the heads, (batch, target, source)."""
        q = split_heads(self.query(x), self.heads)
        k, _ = self.project(memory)
        scores = (q @ k.transpose(2, 3)) * k.shape[-1] ** -0.5  # (batch, heads, target, source)
        scores = scores.masked_fill(~live[:, None, None, :], torch.finfo(scores.dtype).min)
        return scores.softmax(-1).mean(1)

    def remember(self, memory: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `step` needs of memory (batch, source, size).

        Returns:
            Keys and values (batch, heads, source, d), and those of each last live position (batch, 1, size).
        """
        packed = self.packed(memory)  # (batch, source, 2 * size)
        index = (lengths.long() - 1)[:, None, None].expand(-1, 1, packed.shape[2])
        k, v = packed.chunk(2, -1)
        last_k, last_v = packed.gather(1, index).chunk(2, -1)
        return split_heads(k, self.heads), split_heads(v, self.heads), last_k, last_v

    def step(self, x: Tensor, memory: tuple[Tensor, ...], lengths: Tensor) -> Tensor:
        """One position per row: x (row, size), memory as `remember` gave it, lengths (row,)."""
        return self.out(ops.memory_attention(self.query(x), *memory, lengths))


class FeedForward(nn.Module):
    """f(x W1 + b1) W2 + b2, f being max(0, .) in Vaswani et al. 2017, eq. 2."""

    def __init__(self, size: int, hidden: int, activation: Activation = "relu") -> None:
        super().__init__()
        self.up = nn.Linear(size, hidden)
        self.down = nn.Linear(hidden, size)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))
