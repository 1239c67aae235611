"""int8 weights and activations whose results do not depend on the rest of the batch.

Linear layers become QuantizeLinear and com.microsoft MatMulIntegerToFloat. The range of the activations is a constant
of the layer, found by `export.calibrate`; the products are whole numbers, which add up the same in every order. So a
row's result is the same bit for bit in every batch. Weights have one scale per output and 7 bits: the widest
multiply-add of processors without VNNI overflows with 8 (255 * 127 * 2 > 2**15).

Embedding tables become GatherBlockQuantized. Weights of recurrent operators have no such operator: they are stored as
int8 and turned into fp32 when the graph is loaded, which saves the space and leaves the arithmetic in fp32. In both
w ~ (q - 128) * s with s = max |w| / 127 over a block, so the largest weight of each block is met exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from numpy.typing import NDArray

from export.calibrate import Range, Ranges, key, linear_weight
from export.fusions import position as position_axis
from export.graphs import Stage
from export.nodes import MICROSOFT, Writer, constant, producer, single_consumer, walk

BLOCKS = (64, 128, 32, 16)  # preferred first; a block must divide the inputs
SCALES = "scales"  # how the names of scales begin
LEAST_WEIGHTS = 1024  # smaller ones are not worth an operator
LARGEST_CODE = 63  # of a linear layer's weights
CUTS = np.linspace(1.0, 0.7, 13)  # shares of the largest weight of an output that are tried as its largest code


@dataclass
class Report:
    """What became of a stage's weights: how many by operator, and what stayed fp32 and why."""

    quantized: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def count(self, kind: str) -> None:
        """One more weight quantized as `kind`."""
        self.quantized[kind] = self.quantized.get(kind, 0) + 1


METHOD = "linear layers: 7-bit weights by output, 8-bit activations of constant range (MatMulIntegerToFloat)"


def quantize(stage: Stage, tables: frozenset[str], ranges: Ranges) -> Report:
    """Quantize a stage in place.

    Args:
        stage: fused fp32 stage.
        tables: names of initializers that are trained embedding tables (a table of positions is none).
        ranges: of the inputs of linear layers, by key of the weight.
    """
    report = Report()
    for node in walk(stage.graph):
        if node.op_type in ("MatMul", "Gemm"):
            _quantize_linear(stage, node, ranges, report)
        elif node.op_type == "Gather":
            _quantize_table(stage, node, tables, report)
        elif node.op_type in ("LSTM", "GRU", "RNN"):
            _store_recurrent(stage, node, report)
    common.CommonSubexpressionEliminationPass()(stage.model)
    common.RemoveUnusedNodesPass()(stage.model)
    position_axis.fuse(stage)
    for value in stage.graph.initializers.values():
        array = constant(value)
        large = array is not None and array.dtype == np.float32 and array.ndim > 1 and array.size >= LEAST_WEIGHTS
        if large and not str(value.name).startswith(SCALES):
            report.kept.setdefault(_readable(value), "no weight of a linear layer, embedding or recurrence")
    stage.model.opset_imports.setdefault(MICROSOFT, 1)
    return report


def block_size(inputs: int) -> int | None:
    """Inputs that share a scale, None where no block divides them."""
    return next((block for block in BLOCKS if inputs % block == 0), None)


def quantize_blocks(weight: NDArray[np.float32], block: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantize (outputs, inputs) along the inputs: codes (outputs, blocks, block), scales (outputs, blocks)."""
    outputs, inputs = weight.shape
    blocks = weight.reshape(outputs, inputs // block, block).astype(np.float32)
    scales = np.abs(blocks).max(-1) / np.float32(127)  # (outputs, blocks)
    safe = np.where(scales == 0, np.float32(1), scales)
    codes = np.clip(np.rint(blocks / safe[..., None]), -127, 127).astype(np.int16) + 128
    return codes.astype(np.uint8), scales.astype(np.float32)


def dequantize_blocks(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the codes stand for, (outputs, inputs)."""
    values = (codes.astype(np.float32) - np.float32(128)) * scales[..., None]
    return values.reshape(codes.shape[0], -1)


def _readable(value: ir.Value | None) -> str:
    """What a tensor is called in the report: its name in the model, or what it feeds and its shape."""
    assert value is not None
    name = str(value.name)
    if name.startswith("model."):
        return name.removeprefix("model.")
    array = constant(value)
    shape = " x ".join(map(str, array.shape)) if array is not None else "?"
    return f"{' and '.join(sorted({use.node.op_type for use in value.uses()}))} of {shape}"


def quantize_outputs(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantize (inputs, outputs) with a scale per output: codes (inputs, outputs), scales (outputs,).

    Of some shares of an output's largest weight, the one with the least squared error becomes the largest code.
    """
    largest = np.abs(weight).max(0)  # (outputs,)
    largest = np.where(largest == 0, 1, largest)
    best = np.full(largest.shape, np.inf)
    scales = np.ones(largest.shape, np.float32)
    for cut in CUTS:
        tried = (largest * cut / LARGEST_CODE).astype(np.float32)
        error = np.square(_codes(weight, tried) * tried - weight).sum(0)
        scales, best = np.where(error < best, tried, scales), np.minimum(error, best)
    return _codes(weight, scales).astype(np.int8), scales


def _codes(weight: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    codes: NDArray[np.float32] = np.clip(np.rint(weight / scales), -LARGEST_CODE, LARGEST_CODE)
    return codes


def _quantize_linear(stage: Stage, node: ir.Node, ranges: Ranges, report: Report) -> None:
    weight = linear_weight(node)  # (inputs, outputs)
    if weight is None:
        return
    name = _readable(node.inputs[1])
    if weight.size < LEAST_WEIGHTS:
        report.kept[name] = f"only {weight.size} weights"
        return
    if node.op_type == "Gemm" and not _is_plain_gemm(node):
        report.kept[name] = "its Gemm scales or transposes its input"
        return
    found = ranges.get(key(weight))
    if found is None:
        report.kept[name] = "it is used neither in encode nor in step, so its inputs were not seen"
        return
    last, bias = _bias(node, weight.shape[1])
    result = _integer_product(stage, node, weight, found, bias)
    replaced = last.outputs[0]
    result.shape, result.name = replaced.shape, replaced.name if replaced.is_graph_output() else result.name
    ir.convenience.replace_all_uses_with(replaced, result, replace_graph_outputs=True)
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    graph.remove([last] if last is node else [last, node], safe=True)
    report.count("MatMulIntegerToFloat")


def _integer_product(
    stage: Stage, node: ir.Node, weight: NDArray[np.float32], found: Range, bias: ir.Value | None
) -> ir.Value:
    """Write the layer in front of `node`; its output."""
    write = Writer(stage.graph, node, "int8")
    source = node.inputs[0]
    relu = producer(source, "Relu")
    if relu is not None and found.zero == 0:  # rounding to codes cuts negative values off by itself
        source = relu.inputs[0]
    scale, zero = write.constant(found.scale), write.constant(np.array(found.zero, np.uint8))
    rounded = write("QuantizeLinear", source, scale, zero, dtype=ir.DataType.UINT8)
    codes, scales = quantize_outputs(weight)
    return write(
        "MatMulIntegerToFloat",
        rounded,
        write.constant(codes, "codes"),
        scale,
        write.constant(scales, SCALES),
        zero,
        *((None, bias) if bias is not None else ()),
        domain=MICROSOFT,
        dtype=ir.DataType.FLOAT,
    )


def _is_plain_gemm(node: ir.Node) -> bool:
    floats = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
    return all(value == 1.0 for value in floats) and not node.attributes.get_int("transA", 0)


def _bias(node: ir.Node, outputs: int) -> tuple[ir.Node, ir.Value | None]:
    """The layer's bias and the node that adds it: the Gemm itself, or an Add behind a MatMul."""
    if node.op_type == "Gemm":
        return node, node.inputs[2] if len(node.inputs) > 2 else None
    add = single_consumer(node.outputs[0], "Add")
    if add is not None:
        other = add.inputs[0] if add.inputs[1] is node.outputs[0] else add.inputs[1]
        array = constant(other)
        if array is not None and array.shape == (outputs,):
            return add, other
    return node, None


def _quantize_table(stage: Stage, node: ir.Node, tables: frozenset[str], report: Report) -> None:
    table = node.inputs[0]
    weight = constant(table)
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32 or node.attributes.get_int("axis", 0) != 0:
        return
    assert table is not None
    if table.name not in tables:
        report.kept[_readable(table)] = "a table of constants, not of trained weights"
        return
    block = block_size(weight.shape[1])
    if block is None:
        report.kept[_readable(table)] = f"its width {weight.shape[1]} is no multiple of {BLOCKS[-1]}"
        return
    codes, scales = quantize_blocks(np.asarray(weight, np.float32), block)
    last = node
    scaled = single_consumer(node.outputs[0], "Mul")
    factor = constant(scaled.inputs[1 - scaled.inputs.index(node.outputs[0])]) if scaled is not None else None
    if scaled is not None and factor is not None and factor.size == 1:  # the scale of an embedding costs no node
        last, scales = scaled, scales * np.float32(factor)
    write = Writer(stage.graph, node, "int8")
    result = write(
        "GatherBlockQuantized",
        write.constant(codes.reshape(weight.shape), "codes"),
        node.inputs[1],
        write.constant(scales, SCALES),
        domain=MICROSOFT,
        dtype=ir.DataType.FLOAT,
        bits=8,
        block_size=block,
        gather_axis=0,
        quantize_axis=1,
    )
    result.shape = node.outputs[0].shape
    ir.convenience.replace_all_uses_with(last.outputs[0], result)
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    graph.remove([last] if last is node else [last, node], safe=True)
    report.count("GatherBlockQuantized")


def _store_recurrent(stage: Stage, node: ir.Node, report: Report) -> None:
    """Input and recurrent weights (directions, gates * hidden, inputs) as int8 codes, spread out at load time."""
    for position in (1, 2):
        weight = constant(node.inputs[position])
        if weight is None or weight.size < LEAST_WEIGHTS:
            continue
        block = block_size(weight.shape[2])
        if block is None:
            report.kept[_readable(node.inputs[position])] = (
                f"its {weight.shape[2]} inputs are no multiple of {BLOCKS[-1]}"
            )
            continue
        codes, scales = quantize_blocks(weight.reshape(-1, weight.shape[2]).astype(np.float32), block)
        write = Writer(stage.graph, node, "int8")
        centred = write("Cast", write.constant((codes.astype(np.int16) - 128).astype(np.int8), "codes"), to=1)
        spread = write("Mul", centred, write.constant(scales[..., None], SCALES))
        node.replace_input_with(position, write("Reshape", spread, write.constant(list(weight.shape))))
        report.count(f"{node.op_type} (stored int8, computed fp32)")
