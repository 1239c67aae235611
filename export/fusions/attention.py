"""Attention over padded sources: lengths instead of a mask, and no transposes around it.

PyTorch's scaled_dot_product_attention arrives as

    q, k, v = Transpose(Reshape(x)) each; mask = Unsqueeze(Less(Range(source), lengths)); Transpose; Reshape

The standard Attention operator splits the heads itself when it is given (batch, positions, heads * size), and takes
the number of live keys of each row (`nonpad_kv_seqlen`, opset 24). A row with no live key stays finite.
"""

from __future__ import annotations

import onnx_ir as ir

from export.graphs import Stage
from export.nodes import Writer, constant, producer, single_consumer, walk

_SWAP = (0, 2, 1, 3)


def fuse(stage: Stage) -> int:
    """Rewrite every matching Attention; returns how many read lengths now."""
    by_length = 0
    for node in walk(stage.graph):
        if node.op_type == "Attention" and node.domain == "":
            lengths = _lengths_of_mask(node, stage)
            flat = [_without_heads(value) for value in node.inputs[:3]]
            out = _merged_heads(node)
            known = lengths is not None or _mask(node) is None
            if not known or any(value is None for value in flat) or out is None:
                _spread_mask(stage, node)
                continue
            _rewrite(stage, node, flat, lengths, out)
            by_length += lengths is not None
    return by_length


def _mask(node: ir.Node) -> ir.Value | None:
    return node.inputs[3] if len(node.inputs) > 3 else None


def _spread_mask(stage: Stage, node: ir.Node) -> None:
    """Repeat a mask that is the same for all queries for each of them: the runtime does not."""
    query, mask = node.inputs[0], _mask(node)
    if mask is None or mask.shape is None or len(mask.shape) != 4 or mask.shape[2] != 1:
        return
    write = Writer(stage.graph, node)
    one, queries = write.constant([1]), write("Shape", query, start=2, end=3)
    node.replace_input_with(3, write("Expand", mask, write("Concat", one, one, queries, one, axis=0)))


def _without_heads(value: ir.Value | None) -> ir.Value | None:
    """x (batch, positions, heads * size) where `value` is x split into heads."""
    transpose = producer(value, "Transpose")
    if transpose is None or tuple(transpose.attributes["perm"].as_ints()) != _SWAP:
        return None
    reshape = producer(transpose.inputs[0], "Reshape")
    if reshape is None:
        return None
    x = reshape.inputs[0]
    return x if x is not None and x.shape is not None and len(x.shape) == 3 else None


def _merged_heads(node: ir.Node) -> ir.Node | None:
    """The Reshape that brings the heads together again behind the node."""
    transpose = single_consumer(node.outputs[0], "Transpose")
    if transpose is None or tuple(transpose.attributes["perm"].as_ints()) != _SWAP:
        return None
    return single_consumer(transpose.outputs[0], "Reshape")


def _lengths_of_mask(node: ir.Node, stage: Stage) -> ir.Value | None:
    """The (batch,) lengths if the mask is `arange(source) < lengths[:, None]` over each row's keys."""
    value = _mask(node)
    while value is not None and value.producer() is not None:
        made_by = value.producer()
        assert made_by is not None
        if made_by.op_type == "Less":
            positions, bound = made_by.inputs
            lengths = _stripped(bound)
            if _counts_from_zero(positions) and lengths is not None and lengths in stage.graph.inputs:
                return lengths
            return None
        if made_by.op_type not in ("Unsqueeze", "Identity"):
            return None
        value = made_by.inputs[0]
    return None


def _stripped(value: ir.Value | None) -> ir.Value | None:
    """`value` without casts and added axes."""
    while value is not None and (node := value.producer()) is not None and node.op_type in ("Cast", "Unsqueeze"):
        value = node.inputs[0]
    return value


def _counts_from_zero(value: ir.Value | None) -> bool:
    node = producer(value, "Range")
    if node is None:
        return False
    start, step = constant(node.inputs[0]), constant(node.inputs[2])
    return start is not None and step is not None and int(start) == 0 and int(step) == 1


def _rewrite(stage: Stage, node: ir.Node, flat: list[ir.Value | None], lengths: ir.Value | None, out: ir.Node) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    key = node.inputs[1]
    assert key is not None
    assert key.shape is not None
    heads = key.shape[1]
    assert isinstance(heads, int)
    write = Writer(stage.graph, node)
    tail: tuple[ir.Value | None, ...] = ()
    if lengths is not None:
        tail = (None, None, None, write("Cast", lengths, dtype=ir.DataType.INT64, to=ir.DataType.INT64.value))
    attended = write(
        "Attention",
        *flat,
        *tail,
        dtype=ir.DataType.FLOAT,
        q_num_heads=heads,
        kv_num_heads=heads,
        is_causal=node.attributes.get_int("is_causal", 0),
    )
    scale = node.attributes.get("scale")
    if scale is not None and attended.producer() is not None:
        attended.producer().attributes["scale"] = scale  # type: ignore[union-attr]
    attended.shape = out.outputs[0].shape
    ir.convenience.replace_all_uses_with(out.outputs[0], attended, replace_graph_outputs=True)
    transpose = out.inputs[0].producer() if out.inputs[0] is not None else None
    graph.remove([n for n in (out, transpose, node) if n is not None], safe=True)
