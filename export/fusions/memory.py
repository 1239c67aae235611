"""GroupQueryAttention over the memory returns the key and value buffers it was given: make them outputs of the step.

The caller binds each to the input's own buffer. Without that the runtime would allocate and copy them at every step.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from export.graphs import Port, Stage
from export.nodes import walk


def fuse(stage: Stage) -> int:
    """Add the outputs `next.<name>`; returns how many."""
    count = 0
    ports = {port.name: port for port in stage.inputs}
    for node in walk(stage.graph):
        if node.op_type != "GroupQueryAttention":
            continue
        for past, present in zip(node.inputs[3:5], node.outputs[1:3], strict=True):
            if past is None or past not in stage.graph.inputs or present.is_graph_output():
                continue
            port = ports[str(past.name)]
            present.name = f"next.{past.name}"
            present.shape = ir.Shape(port.axes)
            present.dtype = ir.DataType.from_numpy(np.dtype(port.dtype))
            stage.graph.outputs.append(present)
            stage.outputs = (*stage.outputs, Port(present.name, port.dtype, port.axes))
            count += 1
    return count
