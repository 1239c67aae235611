"""One layout for the weights of linear layers, so that stages that share a layer share its bytes.

A layer over (row, size) arrives as Gemm with the weight as torch keeps it (outputs, inputs); the same layer over
(batch, positions, size) arrives as MatMul with the weight transposed. Here every weight becomes (inputs, outputs),
but for one that is also an embedding table, which stays as it is in both of its uses.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from export.graphs import Stage
from export.nodes import add_constant, constant, producer, walk


def fuse(stage: Stage) -> int:
    """Fold transposes of constants into them; returns how many layers were rewritten."""
    count = 0
    for node in walk(stage.graph):
        if node.op_type == "MatMul" and (transpose := producer(node.inputs[1], "Transpose")) is not None:
            weight = constant(transpose.inputs[0])
            if weight is not None and weight.ndim == 2:
                node.replace_input_with(1, add_constant(stage.graph, weight.T, "weight"))
                count += 1
        elif node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1:
            value = node.inputs[1]
            weight = constant(value)
            assert value is not None
            if weight is not None and not is_table(value):
                node.replace_input_with(1, add_constant(stage.graph, weight.T, "weight"))
                node.attributes["transB"] = ir.AttrInt64("transB", 0)
                count += 1
    common.RemoveUnusedNodesPass()(stage.model)
    return count


def is_table(value: ir.Value) -> bool:
    """Whether rows of `value` are looked up by id."""
    return any(use.node.op_type == "Gather" and use.idx == 0 for use in value.uses())
