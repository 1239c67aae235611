"""The k likeliest tokens and their log-probabilities, in one level or two."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export.graphs import IR_VERSION, OPSET, Port, Stage
from export.heads import add_search_head, block_size


def head(vocabulary: int) -> onnxruntime.InferenceSession:
    """A step graph that is nothing but the head."""
    ports = [ir.Value(name=n, shape=ir.Shape(["row"]), type=ir.TensorType(ir.DataType.INT64)) for n in ("tokens", "p")]
    given = ir.Value(name="given", shape=ir.Shape(["row", vocabulary]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.Node("", "Identity", [given])
    node.outputs[0].name = "logits"
    node.outputs[0].dtype = ir.DataType.FLOAT
    graph = ir.Graph([*ports, given], node.outputs, nodes=[node], name="step", opset_imports={"": OPSET})
    row = Port("tokens", "int64", ("row",))
    stage = Stage(
        "step",
        ir.Model(graph, ir_version=IR_VERSION),
        (row, row, row),
        (Port("logits", "float32", ("row", vocabulary)),),
        {},
    )
    add_search_head(stage)
    return onnxruntime.InferenceSession(ir.to_proto(stage.model).SerializeToString())


SESSIONS = {vocabulary: head(vocabulary) for vocabulary in (7, 1021, 1024, 8000)}


def run(vocabulary: int, logits: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    row = np.zeros(len(logits), np.int64)
    tokens, scores = SESSIONS[vocabulary].run(None, {"tokens": row, "p": row, "k": np.array([k]), "given": logits})
    return tokens, scores


@pytest.mark.parametrize(("vocabulary", "block"), [(7, None), (1021, None), (1024, 32), (8000, 80), (32000, 160)])
def test_blocks_divide_the_vocabulary(vocabulary: int, block: int | None) -> None:
    assert block_size(vocabulary) == block


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(SESSIONS)),
    st.integers(1, 5),
    st.integers(1, 120),
    st.integers(0, 10_000),
    st.floats(0.01, 40),
)
def test_the_best_tokens_and_their_log_probabilities(
    vocabulary: int, rows: int, k: int, seed: int, spread: float
) -> None:
    k = min(k, vocabulary)  # 120 is more than any number of blocks here
    logits = (np.random.default_rng(seed).normal(size=(rows, vocabulary)) * spread).astype(np.float32)
    tokens, scores = run(vocabulary, logits, k)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1, keepdims=True)) + exact.max(-1, keepdims=True)
    assert np.allclose(scores, -np.sort(-exact, -1)[:, :k], atol=2e-4, rtol=1e-5)
    assert np.allclose(scores, np.take_along_axis(exact, tokens, -1), atol=2e-4, rtol=1e-5)
    assert all(len(set(row)) == k for row in tokens.tolist())


def test_scores_do_not_depend_on_the_rows_beside_them() -> None:
    logits = np.random.default_rng(0).normal(size=(9, 8000)).astype(np.float32)
    together = run(8000, logits, 5)[1]
    for row in range(9):
        assert np.array_equal(run(8000, logits[row : row + 1], 5)[1][0], together[row])
