"""Reading and editing ONNX graphs: the few helpers that every pass uses."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

MICROSOFT = "com.microsoft"
Attribute = int | float | str | Sequence[int]


def walk(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every node, those of subgraphs included, in order. Safe against edits at the node just given."""
    for node in list(graph):
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from walk(attribute.as_graph())


def operators(graph: ir.Graph) -> dict[str, int]:
    """How often each operator occurs, by name."""
    return dict(sorted(Counter(node.op_type for node in walk(graph)).items()))


def constant(value: ir.Value | None) -> NDArray[np.generic] | None:
    """The array behind a value, None where it is not constant."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes `value`, if it is of the given type."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def single_consumer(value: ir.Value, op_type: str) -> ir.Node | None:
    """The only node that reads `value`, if it is of the given type and nobody else sees the value."""
    nodes = [use.node for use in value.uses()]
    if len(nodes) != 1 or value.is_graph_output() or nodes[0].op_type != op_type:
        return None
    return nodes[0]


def add_constant(graph: ir.Graph, array: NDArray[np.generic], name: str | None = None) -> ir.Value:
    """An initializer of the main graph with this content; names depend on the content, so equal ones are one."""
    array = np.array(array, order="C")
    digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]
    name = f"{name or 'const'}.{digest}"
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


class Writer:
    """Adds nodes in front of `before` (which may be in a subgraph), or at the end of the main graph."""

    def __init__(self, main: ir.Graph, before: ir.Node | None = None, prefix: str = "fuseq") -> None:
        self.main, self.before, self.prefix = main, before, prefix

    def __call__(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str = "",
        dtype: ir.DataType | None = None,
        **attributes: Attribute,
    ) -> ir.Value:
        """Add a node and return its first output."""
        return self.many(op_type, *inputs, domain=domain, dtype=dtype, outputs=1, **attributes)[0]

    def many(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int,
        domain: str = "",
        dtype: ir.DataType | None = None,
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """Add a node with several outputs."""
        node = ir.Node(domain, op_type, inputs, ir.convenience.convert_attributes(attributes), num_outputs=outputs)
        if self.before is None:
            self.main.append(node)
        else:
            graph = self.before.graph
            assert isinstance(graph, ir.Graph)
            graph.insert_before(self.before, node)
        number = self.main.meta.setdefault("fuseq.names", 0)
        self.main.meta["fuseq.names"] = number + 1
        node.name = f"{self.prefix}.{number}.{op_type}"
        for index, value in enumerate(node.outputs):
            value.name = f"{node.name}.{index}"
            if dtype is not None:
                value.dtype = dtype
        return node.outputs

    def constant(self, value: NDArray[np.generic] | int | float | Sequence[int], name: str | None = None) -> ir.Value:
        """A constant; plain ints become int64, floats float32."""
        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        return add_constant(self.main, array, name)
