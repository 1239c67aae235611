"""How the operators of `training.ops` become ONNX nodes.

Self- and cross-attention of the step become com.microsoft GroupQueryAttention: it reads per-row lengths, works in
place on the key and value buffers and costs only what each row's own length asks for. For cross-attention the
encoded keys and values are the past, and the last source token's own ones are fed as the new position: the operator
writes back what stands there already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnxscript import opset23
from onnxscript.values import Op, Opset

from export.nodes import MICROSOFT
from training import ops as _ops  # noqa: F401  registers torch.ops.fuseq

op: Any = opset23
_Schema = onnx.defs.OpSchema


def _formal(name: str, kind: str, option: Any = _Schema.FormalParameterOption.Single) -> Any:
    return _Schema.FormalParameter(name, kind, param_option=option)


# The installed onnx package knows no operators of com.microsoft; this much of the schema lets them be called.
_GROUP_QUERY_ATTENTION = Op(
    Opset(MICROSOFT, 1),
    "GroupQueryAttention",
    _Schema(
        "GroupQueryAttention",
        MICROSOFT,
        1,
        inputs=[
            *(_formal(name, "T") for name in ("query", "key", "value", "past_key", "past_value")),
            *(_formal(name, "M") for name in ("seqlens_k", "total_sequence_length")),
        ],
        outputs=[_formal(name, "T") for name in ("output", "present_key", "present_value")],
        type_constraints=[("T", ["tensor(float)"], ""), ("M", ["tensor(int32)"], "")],
        attributes=[
            _Schema.Attribute("num_heads", onnx.defs.OpSchema.AttrType.INT, required=True),
            _Schema.Attribute("kv_num_heads", onnx.defs.OpSchema.AttrType.INT, required=True),
        ],
    ),
)


def _ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))


def _cached_attention(
    query: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, positions: Any
) -> tuple[Any, Any, Any]:
    heads = int(key_cache.shape[1])
    capacity = op.Cast(op.Shape(key_cache, start=2, end=3), to=ir.DataType.INT32.value)  # (1,)
    attended, keys, values = _GROUP_QUERY_ATTENTION(
        *(op.Unsqueeze(x, _ints(1)) for x in (query, key, value)),  # (row, 1, heads * size)
        key_cache,
        value_cache,
        positions,
        capacity,
        num_heads=heads,
        kv_num_heads=heads,
    )
    return op.Squeeze(attended, _ints(1)), keys, values


def _memory_attention(query: Any, keys: Any, values: Any, last_key: Any, last_value: Any, lengths: Any) -> Any:
    heads = int(keys.shape[1])
    source = op.Shape(keys, start=2, end=3)  # (1,)
    last = op.Sub(lengths, op.Constant(value=onnx.numpy_helper.from_array(np.array(1, np.int32))))  # (row,)
    attended, _, _ = _GROUP_QUERY_ATTENTION(
        op.Unsqueeze(query, _ints(1)),
        last_key,
        last_value,
        keys,
        values,
        last,
        op.Cast(source, to=ir.DataType.INT32.value),
        num_heads=heads,
        kv_num_heads=heads,
    )
    return op.Squeeze(attended, _ints(1))


def _lstm(inputs: Any, lengths: Any, input_weight: Any, hidden_weight: Any, bias: Any) -> tuple[Any, Any, Any]:
    directions, hidden = int(hidden_weight.shape[0]), int(hidden_weight.shape[2])
    w, r, b = (
        _reorder_gates(x, 0, 3, 1, 2) for x in (input_weight, hidden_weight, bias)
    )  # input, output, forget, cell
    b = op.Concat(b, op.Mul(b, op.Constant(value_float=0.0)), axis=1)  # (directions, 8 * hidden)
    outputs, last_h, last_c = op.LSTM(
        op.Transpose(inputs, perm=[1, 0, 2]),
        w,
        r,
        b,
        lengths,
        hidden_size=hidden,
        direction="bidirectional" if directions == 2 else "forward",
    )
    outputs = op.Reshape(op.Transpose(outputs, perm=[2, 0, 1, 3]), _ints(0, 0, directions * hidden))
    h, c = (op.Reshape(op.Transpose(x, perm=[1, 0, 2]), _ints(0, directions * hidden)) for x in (last_h, last_c))
    return outputs, h, c


def _gru(
    inputs: Any, lengths: Any, input_weight: Any, hidden_weight: Any, input_bias: Any, hidden_bias: Any
) -> tuple[Any, Any]:
    directions, hidden = int(hidden_weight.shape[0]), int(hidden_weight.shape[2])
    parts = (input_weight, hidden_weight, input_bias, hidden_bias)
    w, r, input_b, hidden_b = (_reorder_gates(x, 1, 0, 2) for x in parts)  # update, reset, new
    outputs, last = op.GRU(
        op.Transpose(inputs, perm=[1, 0, 2]),
        w,
        r,
        op.Concat(input_b, hidden_b, axis=1),  # (directions, 6 * hidden)
        lengths,
        hidden_size=hidden,
        linear_before_reset=1,
        direction="bidirectional" if directions == 2 else "forward",
    )
    outputs = op.Reshape(op.Transpose(outputs, perm=[2, 0, 1, 3]), _ints(0, 0, directions * hidden))
    return outputs, op.Reshape(op.Transpose(last, perm=[1, 0, 2]), _ints(0, directions * hidden))


def _reorder_gates(x: Any, *order: int) -> Any:
    """Axis 1 from torch's gate order to ONNX's: gate i of the result is torch's gate order[i]."""
    directions, rows, *rest = (int(size) for size in x.shape)
    gates = op.Reshape(x, _ints(directions, len(order), -1))  # (directions, gate, hidden * size)
    return op.Reshape(op.Gather(gates, _ints(*order), axis=1), _ints(directions, rows, *rest))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.fuseq.cached_attention.default: _cached_attention,
    torch.ops.fuseq.memory_attention.default: _memory_attention,
    torch.ops.fuseq.lstm.default: _lstm,
    torch.ops.fuseq.gru.default: _gru,
}
