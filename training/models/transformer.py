"""The Transformer (Vaswani et al. 2017), post- or pre-norm, encoder and decoder of independent depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from serving.core.errors import ConfigError
from serving.core.state_spec import ROW, SOURCE, TIME, Role, StateSpec, StateTensor
from training.layers import (
    ACTIVATIONS,
    Activation,
    CrossAttention,
    Dropout,
    FeedForward,
    Layout,
    SelfAttention,
    real_positions,
    sinusoids,
)
from training.models.base import Model, Sizes, State


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a Transformer."""

    size: int = 256
    feed_forward: int = 1024
    heads: int = 8
    encoder_layers: int = 4
    decoder_layers: int = 2
    dropout: float = 0.1
    pre_norm: bool = True
    tied: bool = True  # target embedding = output projection, and = source embedding where the codec is shared
    activation: Activation = "relu"  # between the two matrices of a feed-forward layer
    positions: Layout = "interleaved"  # how the sinusoids lie in a vector
    scale_embeddings: bool = True  # embeddings times sqrt(size), as in the paper
    output_bias: bool = False  # a bias for each word of the target vocabulary

    def __post_init__(self) -> None:
        sizes = (self.size, self.feed_forward, self.heads, self.encoder_layers, self.decoder_layers)
        if min(sizes) < 1 or not 0 <= self.dropout < 1:
            raise ConfigError("model: sizes, heads and layers must be at least 1, and dropout from 0 to under 1")
        if self.size % self.heads or self.size % 2:
            raise ConfigError(f"model size {self.size} must be even and divisible by the {self.heads} heads")
        if self.activation not in ACTIVATIONS or self.positions not in get_args(Layout):
            raise ConfigError(
                f"model: activation {self.activation!r} must be one of {', '.join(ACTIVATIONS)}, "
                f"positions {self.positions!r} one of {', '.join(get_args(Layout))}"
            )


# State of a decoder layer: keys and values of the past; those of the source, and of its last position once more.
CACHES = ("self_key", "self_value")
MEMORY = ("memory_key", "memory_value", "last_key", "last_value")


class Residual(nn.Module):
    """x + f(x) with layer normalisation before f (pre-norm) or after the sum (post-norm)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.pre = config.pre_norm
        self.norm = nn.LayerNorm(config.size)
        self.dropout = Dropout(config.dropout)

    def enter(self, x: Tensor) -> Tensor:
        """What the sublayer reads."""
        return self.norm(x) if self.pre else x

    def leave(self, x: Tensor, out: Tensor) -> Tensor:
        """The sum, once the sublayer has given `out`."""
        x = x + self.dropout(out)
        return x if self.pre else self.norm(x)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each in a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = SelfAttention(config.size, config.heads)
        self.feed_forward = FeedForward(config.size, config.feed_forward, config.activation)
        self.around_attention = Residual(config)
        self.around_feed_forward = Residual(config)

    def forward(self, x: Tensor, live: Tensor) -> Tensor:  # (batch, source, size), (batch, source)
        x = self.around_attention.leave(x, self.attention(self.around_attention.enter(x), live))
        return self.around_feed_forward.leave(x, self.feed_forward(self.around_feed_forward.enter(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the memory, feed-forward, each in a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = SelfAttention(config.size, config.heads)
        self.cross = CrossAttention(config.size, config.heads)
        self.feed_forward = FeedForward(config.size, config.feed_forward, config.activation)
        self.around_attention = Residual(config)
        self.around_cross = Residual(config)
        self.around_feed_forward = Residual(config)

    def forward(self, x: Tensor, memory: Tensor, live: Tensor) -> Tensor:  # (batch, target, size)
        x = self.around_attention.leave(x, self.attention(self.around_attention.enter(x)))
        x = self.around_cross.leave(x, self.cross(self.around_cross.enter(x), memory, live))
        return self.around_feed_forward.leave(x, self.feed_forward(self.around_feed_forward.enter(x)))

    def weights(self, x: Tensor, memory: Tensor, live: Tensor) -> Tensor:
        """Attention over the memory, (batch, target, source), as `forward` would use it."""
        x = self.around_attention.leave(x, self.attention(self.around_attention.enter(x)))
        return self.cross.weights(self.around_cross.enter(x), memory, live)

    def step(
        self, x: Tensor, caches: tuple[Tensor, ...], memory: tuple[Tensor, ...], positions: Tensor, lengths: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One position per row: x (row, size), keys and values of the past and of the source."""
        out, keys, values = self.attention.step(self.around_attention.enter(x), *caches, positions)
        x = self.around_attention.leave(x, out)
        x = self.around_cross.leave(x, self.cross.step(self.around_cross.enter(x), memory, lengths))
        x = self.around_feed_forward.leave(x, self.feed_forward(self.around_feed_forward.enter(x)))
        return x, (keys, values)


class Transformer(Model):
    """Encoder-decoder Transformer. The step keeps self-attention keys and values in caches, cross ones in memory."""

    Config = Config

    def __init__(self, config: Config, sizes: Sizes) -> None:
        super().__init__()
        self.config, self.sizes = config, sizes
        pad = sizes.special.pad
        self.target_embedding = nn.Embedding(sizes.target_vocabulary, config.size, padding_idx=pad)
        shared = config.tied and sizes.shared_vocabulary
        self.source_embedding = (
            self.target_embedding if shared else nn.Embedding(sizes.source_vocabulary, config.size, padding_idx=pad)
        )
        self.dropout = Dropout(config.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.encoder_norm = nn.LayerNorm(config.size) if config.pre_norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(config.size) if config.pre_norm else nn.Identity()
        self.projection = nn.Linear(config.size, sizes.target_vocabulary, bias=config.output_bias)
        self._initialise()
        if config.tied:
            self.projection.weight = self.target_embedding.weight
        self.scale = config.size**0.5 if config.scale_embeddings else 1.0
        table = sinusoids(max(sizes.source_limit, sizes.target_limit), config.size, config.positions)
        self.register_buffer("position_table", table, persistent=False)  # (positions, size), a constant

    def _initialise(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, std=self.config.size**-0.5)
        if self.config.output_bias:
            nn.init.zeros_(self.projection.bias)

    def _embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:  # (batch, positions) -> (batch, positions, size)
        x = embedding(ids) * self.scale + self.position_table[: ids.shape[1]]
        return self.dropout(x)

    def _encode(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoder states (batch, source, size) and the mask of live positions (batch, source)."""
        live = real_positions(lengths, source.shape[1])
        x = self._embed(self.source_embedding, source)  # (batch, source, size)
        for layer in self.encoder:
            x = layer(x, live)
        return self.encoder_norm(x), live

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        memory, _ = self._encode(source, lengths)
        state: State = {}
        for index, layer in enumerate(self.decoder):
            remembered = layer.cross.remember(memory, lengths)
            state |= {f"{kind}_{index}": tensor for kind, tensor in zip(MEMORY, remembered, strict=True)}
        state["source_length"] = lengths
        return state

    def step(self, tokens: Tensor, positions: Tensor, state: State) -> tuple[Tensor, State]:
        x = self.target_embedding(tokens) * self.scale + self.position_table[positions.long()]  # (row, size)
        updated: State = {}
        for index, layer in enumerate(self.decoder):
            caches = tuple(state[f"{kind}_{index}"] for kind in CACHES)
            memory = tuple(state[f"{kind}_{index}"] for kind in MEMORY)
            x, caches = layer.step(x, caches, memory, positions, state["source_length"])
            updated |= {f"{kind}_{index}": cache for kind, cache in zip(CACHES, caches, strict=True)}
        return self.projection(self.decoder_norm(x)), updated

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        memory, live = self._encode(source, lengths)
        x = self._embed(self.target_embedding, target)  # (batch, target, size)
        for layer in self.decoder:
            x = layer(x, memory, live)
        return self.projection(self.decoder_norm(x))

    def align(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        memory, live = self._encode(source, lengths)
        x = self._embed(self.target_embedding, target)
        *earlier, last = self.decoder
        weights = []
        for layer in earlier:
            weights.append(layer.weights(x, memory, live))
            x = layer(x, memory, live)
        weights.append(last.weights(x, memory, live))
        return torch.stack(weights).mean(0)  # (batch, target, source)

    def state_spec(self) -> StateSpec:
        heads, size = self.config.heads, self.config.size // self.config.heads
        kinds: tuple[tuple[str, tuple[str | int, ...], Role], ...] = (
            *((kind, (ROW, heads, TIME, size), Role.CACHE) for kind in CACHES),
            *((kind, (ROW, heads, SOURCE, size), Role.MEMORY) for kind in MEMORY[:2]),
            *((kind, (ROW, 1, heads * size), Role.MEMORY) for kind in MEMORY[2:]),
        )
        tensors = [
            StateTensor(f"{kind}_{index}", "float32", axes, role)
            for index in range(self.config.decoder_layers)
            for kind, axes, role in kinds
        ]
        return StateSpec((*tensors, StateTensor("source_length", "int32", (ROW,), Role.MEMORY)))
