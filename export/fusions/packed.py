"""Query, key and value of one projection go into GroupQueryAttention as they come, without being split."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from export.graphs import Stage
from export.nodes import Writer, constant, producer, walk


def fuse(stage: Stage) -> int:
    """Rewrite `GroupQueryAttention(*Unsqueeze(Split(x)))`; returns how many."""
    count = 0
    for node in walk(stage.graph):
        if node.op_type == "GroupQueryAttention" and (packed := _packed(node)) is not None:
            write = Writer(stage.graph, node)
            node.replace_input_with(0, write("Unsqueeze", packed, write.constant([1])))  # (row, 1, 3 * heads * size)
            node.replace_input_with(1, None)
            node.replace_input_with(2, None)
            count += 1
    return count


def _packed(node: ir.Node) -> ir.Value | None:
    """The projection (row, 3 * heads * size) that query, key and value are the three equal parts of."""
    parts = []
    for value in node.inputs[:3]:
        unsqueeze = producer(value, "Unsqueeze")
        axes = constant(unsqueeze.inputs[1]) if unsqueeze is not None else None
        if unsqueeze is None or axes is None or not np.array_equal(axes, [1]):
            return None
        parts.append(unsqueeze.inputs[0])
    split = producer(parts[0], "Split")
    if split is None or list(split.outputs) != parts or split.attributes.get_int("num_outputs", 0) != 3:
        return None
    x = split.inputs[0]
    return x if x is not None and x.shape is not None and len(x.shape) == 2 else None
