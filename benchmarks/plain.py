"""The subjects as one writes them in PyTorch without an engine: a step with caches that grow, and a loop around it.

What the peers `pytorch` and `plain_onnx` run. A model has `encode(source, mask) -> memory` and
`step(token, memory, state) -> (logits, state)`, both with tuples of tensors, so that they can be compiled or exported.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.formats import huggingface
from benchmarks.peers.base import Ids, Search, Weights

Tensors = tuple[Tensor, ...]


class PlainTransformer(nn.Module):
    """Encoder and cached decoder with the layers of a Hugging Face MarianMT (post-norm) or M2M100 (pre-norm)."""

    def __init__(self, other: Any, pre_norm: bool) -> None:
        super().__init__()
        self.activation: Any
        self.positions: Tensor  # (positions, size)
        self.bias: Tensor  # (1, vocabulary)
        c = other.config
        self.pre_norm, self.heads = pre_norm, c.decoder_attention_heads
        self.scale = c.d_model**0.5 if c.scale_embedding else 1.0
        self.encoder, self.decoder = other.model.encoder.layers, other.model.decoder.layers
        self.table = other.model.shared.weight  # the table alone: M2M100's module scales what it looks up
        positions = other.model.encoder.embed_positions
        table = positions.weights[positions.padding_idx + 1 :] if pre_norm else positions.weight
        self.register_buffer("positions", table.detach().clone())  # (positions, size)
        self.projection = other.lm_head
        self.register_buffer("bias", getattr(other, "final_logits_bias", torch.zeros(1, 1)).detach().clone())
        self.last_norms = nn.ModuleList(
            part.layer_norm if pre_norm else nn.Identity() for part in (other.model.encoder, other.model.decoder)
        )
        self.activation = {"relu": F.relu, "swish": F.silu, "silu": F.silu, "gelu": F.gelu}[c.activation_function]

    def _split(self, x: Tensor) -> Tensor:  # (batch, positions, size) -> (batch, heads, positions, d)
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def _around(self, norm: nn.Module, x: Tensor, block: Any) -> Tensor:
        """Residual and normalisation around a block."""
        around: Tensor = x + block(norm(x)) if self.pre_norm else norm(x + block(x))
        return around

    def _attend(self, attention: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        attended = F.scaled_dot_product_attention(self._split(query), keys, values, attn_mask=mask)
        out: Tensor = attention.out_proj(attended.transpose(1, 2).flatten(2))
        return out

    def _feed_forward(self, layer: Any, x: Tensor) -> Tensor:
        return self._around(layer.final_layer_norm, x, lambda y: layer.fc2(self.activation(layer.fc1(y))))

    def encode(self, source: Tensor, mask: Tensor) -> Tensors:
        """source, mask (batch, source) -> mask of attention, then keys and values (batch, heads, source, d) a layer."""
        live = mask[:, None, None, :].bool()
        x = F.embedding(source, self.table) * self.scale + self.positions[: source.shape[1]]  # (batch, source, size)
        for layer in self.encoder:
            a = layer.self_attn

            def attend(y: Tensor, a: Any = a) -> Tensor:
                return self._attend(a, a.q_proj(y), self._split(a.k_proj(y)), self._split(a.v_proj(y)), live)

            x = self._feed_forward(layer, self._around(layer.self_attn_layer_norm, x, attend))
        x = self.last_norms[0](x)
        memory = [live]
        for layer in self.decoder:
            memory += [self._split(layer.encoder_attn.k_proj(x)), self._split(layer.encoder_attn.v_proj(x))]
        return tuple(memory)

    def first_state(self, rows: int, memory: Tensors) -> Tensors:
        """Empty caches (batch, heads, 0, d), keys and values of each layer."""
        heads, size = memory[1].shape[1], memory[1].shape[3]
        return tuple(memory[1].new_zeros(rows, heads, 0, size) for _ in range(2 * len(self.decoder)))

    def step(self, token: Tensor, memory: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        """token (batch,) at the position that follows the caches -> logits (batch, vocabulary), longer caches."""
        position = state[0].shape[2]
        x = (F.embedding(token, self.table) * self.scale + self.positions[position])[:, None]  # (batch, 1, size)
        live, *crossed = memory
        grown: list[Tensor] = []
        for index, layer in enumerate(self.decoder):
            a, c = layer.self_attn, layer.encoder_attn

            def attend(y: Tensor, a: Any = a, index: int = index) -> Tensor:
                keys = torch.cat([state[2 * index], self._split(a.k_proj(y))], 2)  # (batch, heads, time, d)
                values = torch.cat([state[2 * index + 1], self._split(a.v_proj(y))], 2)
                grown.extend((keys, values))
                return self._attend(a, a.q_proj(y), keys, values, None)

            def cross(y: Tensor, c: Any = c, index: int = index) -> Tensor:
                return self._attend(c, c.q_proj(y), crossed[2 * index], crossed[2 * index + 1], live)

            x = self._around(layer.self_attn_layer_norm, x, attend)
            x = self._around(layer.encoder_attn_layer_norm, x, cross)
            x = self._feed_forward(layer, x)
        return self.projection(self.last_norms[1](x[:, 0])) + self.bias, tuple(grown)


class PlainBahdanau(nn.Module):
    """Our own Bahdanau model, without anything that export or engine add."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def encode(self, source: Tensor, mask: Tensor) -> Tensors:
        """source, mask (batch, source) -> encoder states, attention keys, mask, last backward state."""
        m = self.model
        if torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting():  # packed sequences cannot be exported
            memory, (last, _) = m.encoder.lstm(m.source_embedding(source))
            backward = last[1]
        else:
            memory, backward = m.encoder(m.source_embedding(source), mask.sum(1))
        return memory, m.attention.key(memory), mask.bool(), backward

    def first_state(self, rows: int, memory: Tensors) -> Tensors:
        """Hidden and cell (batch, hidden)."""
        hidden = torch.tanh(self.model.bridge(memory[3]))
        return hidden, torch.zeros_like(hidden)

    def step(self, token: Tensor, memory: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        """token (batch,) -> logits (batch, vocabulary), hidden and cell."""
        m = self.model
        states = {"hidden": state[0], "cell": state[1], "memory": memory[0], "keys": memory[1]}
        read, hidden, cell, _ = m._cell(m.target_embedding(token), memory[2], states)
        return m._logits(read), (hidden, cell)


def load(weights: Weights) -> PlainTransformer | PlainBahdanau:
    """The subject as a plain model, fp32, in evaluation mode."""
    if weights.form != "bahdanau":
        return PlainTransformer(huggingface.load(weights), weights.form == "fuseq").eval()
    from benchmarks.models import RECURRENT
    from training.models.bahdanau import Bahdanau, Config
    from training.models.base import Sizes

    kept = torch.load(weights.path(RECURRENT), weights_only=True)
    size = kept["vocabulary"]
    model = Bahdanau(Config(**kept["config"]), Sizes(size, size, 128, 160))
    model.load_state_dict(kept["state"])
    return PlainBahdanau(model.eval()).eval()


def pad_batch(batch: Ids, pad: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Right-padded ids and their mask, both (batch, source)."""
    longest = max(map(len, batch))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in batch])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
    return ids.to(device), mask.to(device)


class GreedyLoop:
    """The likeliest word again and again, for the whole batch until its last row has ended.

    `encode`, `first` and `step` are the model's, or what stands in for them; `banned` ids are never chosen.
    """

    def __init__(self, encode: Any, first: Any, step: Any, weights: Weights, banned: tuple[int, ...]) -> None:
        self._encode, self._first, self._step = encode, first, step
        self._weights, self._banned = weights, list(banned)

    def __call__(self, source: Tensor, mask: Tensor, search: Search) -> Tensor:
        """(batch, generated) ids, rows that ended earlier filled with the end symbol."""
        if search.beam != 1:
            raise NotImplementedError("only greedy search; a beam search by hand is nobody's plain use")
        rows, eos = len(source), self._weights.eos
        memory = self._encode(source, mask)
        state = self._first(rows, memory)
        banned = [*self._banned, *([eos] if search.forced else [])]
        token = torch.full((rows,), self._weights.start, device=source.device)
        ended = torch.zeros(rows, dtype=torch.bool, device=source.device)
        generated = []
        for _ in range(search.forced or search.limit):
            logits, state = self._step(token, memory, state)
            if banned:
                logits[:, banned] = -torch.inf
            token = logits.argmax(-1).masked_fill(ended, eos)  # (batch,)
            generated.append(token)
            ended |= token == eos
            if not search.forced and bool(ended.all()):
                break
        return torch.stack(generated, 1)


def until_end(ids: list[list[int]], eos: int) -> Ids:
    """Rows up to their end symbol."""
    return [row[: row.index(eos)] if eos in row else row for row in ids]


def banned_of(weights: Weights) -> tuple[int, ...]:
    """Ids that a model must not choose: the padding of MarianMT, which has no logit of its own."""
    return (weights.pad,) if weights.form == "marian" else ()
