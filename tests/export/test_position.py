"""Moving an axis through a graph changes no number."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from export.fusions import lookup, position
from export.graphs import Stage
from export.nodes import operators

RANDOM = np.random.default_rng(1)
SIZE = 8


def constants(**arrays: Any) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]


def stage_of(nodes: list[onnx.NodeProto], initializers: list[onnx.TensorProto], inputs: dict[str, list[Any]]) -> Stage:
    given = [
        helper.make_tensor_value_info(name, T.INT32 if name == "ids" else T.FLOAT, shape)
        for name, shape in inputs.items()
    ]
    out = helper.make_tensor_value_info("out", T.FLOAT, None)
    graph = helper.make_graph(nodes, "g", given, [out], initializers)
    model = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    )
    return Stage("step", ir.from_proto(model), (), (), {})


def run(stage: Stage, **feeds: Any) -> Any:
    session = onnxruntime.InferenceSession(
        ir.to_proto(stage.model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)[0]


def test_the_axis_moves_behind_a_residual_stream_and_stops_at_gemm() -> None:
    """x + f(Squeeze(g(Unsqueeze(x)))), twice, then a Gemm, which knows two axes only."""
    nodes, x = [], "x"
    for layer in "ab":
        nodes += [
            helper.make_node("Unsqueeze", [x, "one"], [f"{layer}1"]),
            helper.make_node("Softmax", [f"{layer}1"], [f"{layer}2"], axis=-1),  # stands for the attention
            helper.make_node("Squeeze", [f"{layer}2", "one"], [f"{layer}3"]),
            helper.make_node("Relu", [f"{layer}3"], [f"{layer}4"]),
            helper.make_node("Add", [f"{layer}4", "bias"], [f"{layer}5"]),
            helper.make_node("Add", [x, f"{layer}5"], [f"{layer}6"]),
            helper.make_node("LayerNormalization", [f"{layer}6", "bias", "bias"], [f"{layer}7"], axis=-1),
        ]
        x = f"{layer}7"
    nodes.append(helper.make_node("Gemm", [x, "weight"], ["out"]))
    weight, bias = RANDOM.standard_normal((SIZE, 3), np.float32), RANDOM.standard_normal(SIZE, np.float32)
    stage = stage_of(nodes, constants(one=np.array([1]), weight=weight, bias=bias), {"x": ["row", SIZE]})
    given = RANDOM.standard_normal((5, SIZE), np.float32)
    before = run(stage, x=given)
    assert position.fuse(stage) == 1
    found = operators(stage.graph)
    assert (found["Unsqueeze"], found["Squeeze"]) == (2, 1)
    np.testing.assert_allclose(run(stage, x=given), before, rtol=1e-5, atol=1e-6)  # the runtime fuses them differently


@pytest.mark.parametrize("other", ["matrix", "y"])
def test_an_operand_that_would_be_spread_otherwise_stops_it(other: str) -> None:
    """A constant (row, size) or an input of unknown axes must not meet (row, 1, size)."""
    nodes = [
        helper.make_node("Squeeze", ["x", "one"], ["flat"]),
        helper.make_node("Add", ["flat", other], ["sum"]),
        helper.make_node("Unsqueeze", ["sum", "one"], ["whole"]),
        helper.make_node("Relu", ["whole"], ["out"]),
    ]
    matrix = RANDOM.standard_normal((4, SIZE), np.float32)
    inputs = {"x": ["row", 1, SIZE]} | ({"y": [SIZE]} if other == "y" else {})
    stage = stage_of(nodes, constants(one=np.array([1]), matrix=matrix), inputs)
    feeds = {"x": RANDOM.standard_normal((4, 1, SIZE), np.float32)}
    feeds |= {"y": RANDOM.standard_normal(SIZE, np.float32)} if other == "y" else {}
    before = run(stage, **feeds)
    position.fuse(stage)
    np.testing.assert_array_equal(run(stage, **feeds), before)
    assert operators(stage.graph)["Squeeze"] == 1


def test_a_lookup_is_one_node() -> None:
    nodes = [
        helper.make_node("Cast", ["ids"], ["wide"], to=T.INT64),
        helper.make_node("Unsqueeze", ["wide", "last"], ["index"]),
        helper.make_node("GatherND", ["table", "index"], ["out"]),
    ]
    table = RANDOM.standard_normal((7, SIZE), np.float32)
    stage = stage_of(nodes, constants(last=np.array([-1]), table=table), {"ids": ["row"]})
    ids = np.array([6, 0, 3], np.int32)
    assert lookup.fuse(stage) == 1
    assert operators(stage.graph) == {"Gather": 1}
    np.testing.assert_array_equal(run(stage, ids=ids), table[ids])
