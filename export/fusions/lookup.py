"""Rows of a table by id as one Gather.

`table[ids]` arrives as GatherND over ids with an added axis, behind a cast that Gather does not need.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from export.graphs import Stage
from export.nodes import Writer, constant, producer, walk

IDS = (ir.DataType.INT32, ir.DataType.INT64)


def fuse(stage: Stage) -> int:
    """Rewrite `GatherND(table, Unsqueeze(ids, -1))`; returns how many."""
    count = 0
    for node in walk(stage.graph):
        if node.op_type != "GatherND" or node.attributes.get_int("batch_dims", 0) != 0:
            continue
        ids = _ids(node.inputs[1])
        if ids is None or constant(node.inputs[0]) is None:
            continue
        found = Writer(stage.graph, node)("Gather", node.inputs[0], ids, dtype=node.outputs[0].dtype, axis=0)
        out = node.outputs[0]
        found.shape, found.name = out.shape, out.name if out.is_graph_output() else found.name
        ir.convenience.replace_all_uses_with(out, found, replace_graph_outputs=True)
        count += 1
    common.RemoveUnusedNodesPass()(stage.model)
    return count


def _ids(index: ir.Value | None) -> ir.Value | None:
    """The ids that `index` holds along a new last axis, before a cast between integers."""
    unsqueeze = producer(index, "Unsqueeze")
    if unsqueeze is None:
        return None
    ids, axes = unsqueeze.inputs[0], constant(unsqueeze.inputs[1])
    if ids is None or ids.shape is None or axes is None or axes.size != 1:
        return None
    if int(np.ravel(axes)[0]) not in (-1, len(ids.shape)):
        return None
    cast = producer(ids, "Cast")
    before = cast.inputs[0] if cast is not None else None
    return before if before is not None and before.dtype in IDS else ids
