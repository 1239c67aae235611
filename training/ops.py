"""Operators that the runtime has as one node each, as torch operators with an eager meaning.

A model calls them in `step` (and, for recurrences over padded batches, in `encode` when it is exported); eager
mode runs the plain torch code below, and `export` translates each to its fused ONNX node. They carry no
gradient: teacher-forced training uses torch's own differentiable attention and recurrence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _attend(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over the first `lengths` positions (Vaswani et al. 2017, eq. 1)."""
    heads, time, size = keys.shape[1], keys.shape[2], keys.shape[3]
    q = query.unflatten(-1, (heads, size)).unsqueeze(2)  # (row, heads, 1, size)
    scores = (q @ keys.transpose(2, 3)) * size**-0.5  # (row, heads, 1, time)
    live = torch.arange(time, device=keys.device) < lengths[:, None]  # (row, time)
    scores = scores.masked_fill(~live[:, None, None, :], torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) @ values).squeeze(2).flatten(1)  # (row, heads * size)


@torch.library.custom_op("fuseq::cached_attention", mutates_args=())
def cached_attention(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal self-attention of one new position per row over its cache.

    Args:
        query, key, value: (row, heads * size) projections of the new position.
        key_cache, value_cache: (row, heads, time, size); positions before the row's own are filled.
        positions: (row,) int32, the new position of each row.

    Returns:
        Attended values (row, heads * size), and both caches with the new position written.
    """
    rows = torch.arange(query.shape[0], device=query.device)
    heads, size = key_cache.shape[1], key_cache.shape[3]
    keys, values = key_cache.clone(), value_cache.clone()
    keys[rows, :, positions.long()] = key.unflatten(-1, (heads, size))
    values[rows, :, positions.long()] = value.unflatten(-1, (heads, size))
    return _attend(query, keys, values, positions + 1), keys, values


@cached_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key_cache), torch.empty_like(value_cache)


@torch.library.custom_op("fuseq::memory_attention", mutates_args=())
def memory_attention(
    query: Tensor, keys: Tensor, values: Tensor, last_key: Tensor, last_value: Tensor, lengths: Tensor
) -> Tensor:
    """Attention of one position per row over the row's encoded source.

    The last live position comes a second time by itself: the runtime's operator attends to past positions and a new
    one, so it takes the last one for new.

    Args:
        query: (row, heads * size).
        keys, values: (row, heads, source, size), computed once from the memory.
        last_key, last_value: (row, 1, heads * size), those of each row's last live position.
        lengths: (row,) int32, live source positions, at least 1.

    Returns:
        (row, heads * size).
    """
    rows = torch.arange(query.shape[0], device=query.device)
    heads, size = keys.shape[1], keys.shape[3]
    keys, values = keys.clone(), values.clone()
    keys[rows, :, lengths.long() - 1] = last_key.squeeze(1).unflatten(-1, (heads, size))
    values[rows, :, lengths.long() - 1] = last_value.squeeze(1).unflatten(-1, (heads, size))
    return _attend(query, keys, values, lengths)


@memory_attention.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, last_key: Tensor, last_value: Tensor, lengths: Tensor) -> Tensor:
    return torch.empty_like(query)


@torch.library.custom_op("fuseq::lstm", mutates_args=())
def lstm(
    inputs: Tensor, lengths: Tensor, input_weight: Tensor, hidden_weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One LSTM layer over a right-padded batch, each row running over its own length only.

    Args:
        inputs: (batch, time, size).
        lengths: (batch,) int32.
        input_weight: (directions, 4 * hidden, size), gates in torch's order (input, forget, cell, output).
        hidden_weight: (directions, 4 * hidden, hidden).
        bias: (directions, 4 * hidden), the sum of torch's two.

    Returns:
        Outputs (batch, time, directions * hidden), zero in the padding; the last hidden and cell states
        (batch, directions * hidden), each direction's after its own last real position.
    """
    directions, hidden = hidden_weight.shape[0], hidden_weight.shape[2]
    batch, time = inputs.shape[0], inputs.shape[1]
    outputs = inputs.new_zeros(batch, time, directions, hidden)
    last_h = inputs.new_zeros(batch, directions, hidden)
    last_c = inputs.new_zeros(batch, directions, hidden)
    for direction in range(directions):
        h, c = last_h[:, direction], last_c[:, direction]
        for t in range(time) if direction == 0 else reversed(range(time)):
            gates = inputs[:, t] @ input_weight[direction].T + h @ hidden_weight[direction].T + bias[direction]
            i, f, g, o = gates.chunk(4, -1)  # (batch, hidden)
            new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            new_h = o.sigmoid() * new_c.tanh()
            live = (t < lengths)[:, None]  # (batch, 1)
            h, c = torch.where(live, new_h, h), torch.where(live, new_c, c)
            outputs[:, t, direction] = torch.where(live, new_h, 0.0)
        last_h[:, direction], last_c[:, direction] = h, c
    return outputs.flatten(2), last_h.flatten(1), last_c.flatten(1)


@lstm.register_fake
def _(
    inputs: Tensor, lengths: Tensor, input_weight: Tensor, hidden_weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    directions, hidden = hidden_weight.shape[0], hidden_weight.shape[2]
    last = inputs.new_empty(inputs.shape[0], directions * hidden)
    return inputs.new_empty(inputs.shape[0], inputs.shape[1], directions * hidden), last, torch.empty_like(last)


@torch.library.custom_op("fuseq::gru", mutates_args=())
def gru(
    inputs: Tensor,
    lengths: Tensor,
    input_weight: Tensor,
    hidden_weight: Tensor,
    input_bias: Tensor,
    hidden_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """One GRU layer over a right-padded batch, each row running over its own length only.

    The reset gate multiplies after the matrix, h~ = tanh(W x + b + r * (R h + b')), and the update gate the old state,
    as in torch.nn.GRU and in ONNX with linear_before_reset = 1; Cho et al. 2014, eq. 7-8, have both the other way.

    Args:
        inputs: (batch, time, size).
        lengths: (batch,) int32.
        input_weight: (directions, 3 * hidden, size), gates in torch's order (reset, update, new).
        hidden_weight: (directions, 3 * hidden, hidden).
        input_bias, hidden_bias: (directions, 3 * hidden).

    Returns:
        Outputs (batch, time, directions * hidden), zero in the padding; the last states (batch, directions * hidden),
        each direction's after its own last real position.
    """
    directions, hidden = hidden_weight.shape[0], hidden_weight.shape[2]
    batch, time = inputs.shape[0], inputs.shape[1]
    outputs = inputs.new_zeros(batch, time, directions, hidden)
    last = inputs.new_zeros(batch, directions, hidden)
    for direction in range(directions):
        h = last[:, direction]
        for t in range(time) if direction == 0 else reversed(range(time)):
            x_gates = inputs[:, t] @ input_weight[direction].T + input_bias[direction]  # (batch, 3 * hidden)
            h_gates = h @ hidden_weight[direction].T + hidden_bias[direction]
            (x_r, x_z, x_n), (h_r, h_z, h_n) = x_gates.chunk(3, -1), h_gates.chunk(3, -1)
            update = (x_z + h_z).sigmoid()
            new = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
            live = (t < lengths)[:, None]  # (batch, 1)
            h = torch.where(live, (1 - update) * new + update * h, h)
            outputs[:, t, direction] = torch.where(live, h, 0.0)
        last[:, direction] = h
    return outputs.flatten(2), last.flatten(1)


@gru.register_fake
def _(
    inputs: Tensor,
    lengths: Tensor,
    input_weight: Tensor,
    hidden_weight: Tensor,
    input_bias: Tensor,
    hidden_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    directions, hidden = hidden_weight.shape[0], hidden_weight.shape[2]
    outputs = inputs.new_empty(inputs.shape[0], inputs.shape[1], directions * hidden)
    return outputs, inputs.new_empty(inputs.shape[0], directions * hidden)
