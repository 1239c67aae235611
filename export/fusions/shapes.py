"""Sizes of named axes: read each from one place, and drop what nobody reads any more.

Every memory tensor has the same source axis, every cache the same time axis, everything the same rows. Once all
sizes come from the same inputs, index computations repeated in every layer are equal and merge into one.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from export.graphs import Stage
from export.nodes import walk


def fuse(stage: Stage) -> int:
    """Merge equal sizes and what follows from them; returns how many nodes went."""
    before = sum(1 for _ in walk(stage.graph))
    axes = {value: port.axes for value, port in zip(stage.graph.inputs, stage.inputs, strict=True)}
    first: dict[str, tuple[ir.Value, int]] = {}
    for value, names in axes.items():
        for position, name in enumerate(names):
            if isinstance(name, str):
                first.setdefault(name, (value, position))
    for node in walk(stage.graph):
        read = node.inputs[0] if node.op_type == "Shape" else None
        if read is not None and read in axes:
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(axes[read]))
            name = axes[read][start]
            if end == start + 1 and isinstance(name, str):
                origin, position = first[name]
                node.replace_input_with(0, origin)
                node.attributes["start"] = ir.AttrInt64("start", position)
                node.attributes["end"] = ir.AttrInt64("end", position + 1)
    common.CommonSubexpressionEliminationPass()(stage.model)
    common.RemoveUnusedNodesPass()(stage.model)
    return before - sum(1 for _ in walk(stage.graph))
