"""One decoder position as an axis through the whole step.

GroupQueryAttention works on (row, 1, size), the model on (row, size). The axis is added once in front, and taken away
once behind: a Squeeze moves behind whatever does not care for the number of axes, until it meets an Unsqueeze. Gemm
does care, so this is for quantized steps.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from export.graphs import Stage
from export.nodes import add_constant, constant

AXIS = 1
# Operators that treat the last axis, or each value, alike whatever axes stand before: all but the first input constant.
ALONG = ("QuantizeLinear", "MatMulIntegerToFloat", "LayerNormalization", "Relu", "Sigmoid", "Tanh", "Gelu")
BOTH = ("Add", "Mul")


def fuse(stage: Stage) -> int:
    """Move every Squeeze of the axis as far back as it goes; returns how many nodes fewer there are."""
    graph = stage.graph
    before = len(graph)
    whole: dict[ir.Value, ir.Value] = {}  # a value without the axis -> the same with it
    for node in list(graph):
        source = node.inputs[0] if node.inputs else None
        if node.op_type == "Squeeze" and _is_axis(node) and source is not None:
            whole[node.outputs[0]] = source
        elif node.op_type == "Unsqueeze" and _is_axis(node) and source in whole:
            ir.convenience.replace_all_uses_with(node.outputs[0], whole[source])
        elif not node.outputs[0].is_graph_output() and (wanted := _with_axis(graph, node, whole)) is not None:
            for index, value in wanted.items():
                node.replace_input_with(index, value)
            whole[_squeezed(graph, node)] = node.outputs[0]
    common.CommonSubexpressionEliminationPass()(stage.model)
    common.RemoveUnusedNodesPass()(stage.model)
    return before - len(graph)


def _is_axis(node: ir.Node) -> bool:
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return axes is not None and np.array_equal(np.ravel(axes), [AXIS])


def _with_axis(graph: ir.Graph, node: ir.Node, whole: dict[ir.Value, ir.Value]) -> dict[int, ir.Value] | None:
    """The inputs to replace so that the node works with the axis; None where it cannot or nothing is gained."""
    if not any(value in whole for value in node.inputs if value is not None):
        return None
    if node.op_type in ALONG:
        source = node.inputs[0]
        others = [value for value in node.inputs[1:] if value is not None]
        if source not in whole or any(constant(value) is None for value in others):
            return None
        return {0: whole[source]}
    if node.op_type not in BOTH:
        return None
    wanted: dict[int, ir.Value] = {}
    for index, value in enumerate(node.inputs):
        assert value is not None
        array = constant(value)
        if array is not None:
            if array.ndim > 1:
                return None
        elif value in whole:
            wanted[index] = whole[value]
        elif value.shape is not None and len(value.shape) == AXIS + 1:
            wanted[index] = _insert(graph, node, "Unsqueeze", value)
        else:
            return None
    return wanted


def _squeezed(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """A Squeeze behind the node, which everybody reads who read the node."""
    out = node.outputs[0]
    squeeze = ir.Node("", "Squeeze", [out, _axes(graph)], name=f"{node.name}.position")
    flat = squeeze.outputs[0]
    flat.name, flat.type, flat.shape = f"{out.name}.flat", out.type, out.shape
    for node_, index in [(use.node, use.idx) for use in out.uses()]:
        if node_ is not squeeze:
            node_.replace_input_with(index, flat)
    graph.insert_after(node, squeeze)
    out.shape = None
    return flat


def _insert(graph: ir.Graph, node: ir.Node, kind: str, value: ir.Value) -> ir.Value:
    added = ir.Node("", kind, [value, _axes(graph)], name=f"{node.name}.{kind}")
    added.outputs[0].name, added.outputs[0].type = f"{value.name}.{node.name}.whole", value.type
    graph.insert_before(node, added)
    return added.outputs[0]


def _axes(graph: ir.Graph) -> ir.Value:
    return add_constant(graph, np.array([AXIS], np.int64))
