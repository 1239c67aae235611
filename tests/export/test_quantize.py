"""int8: what the codes stand for, what is stored once, and that no row depends on another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from onnxruntime.quantization import quantize_dynamic

from export.errors import ParityError
from export.nodes import operators
from export.quantize import LARGEST_CODE, block_size, dequantize_blocks, quantize_blocks, quantize_outputs
from export.sessions import Sessions
from export.verify import check_independence, measure_parity
from tests.export.conftest import Built

WEIGHTS = hnp.arrays(np.float32, (3, 32), elements=st.floats(-4, 4, width=32, allow_subnormal=False))


@settings(deadline=None)
@given(WEIGHTS)
def test_a_weight_is_met_to_half_a_step(weight: NDArray[np.float32]) -> None:
    codes, scales = quantize_blocks(weight, 16)
    assert codes.shape == (3, 2, 16)
    assert scales.shape == (3, 2)
    error = np.abs(dequantize_blocks(codes, scales) - weight).reshape(3, 2, 16)
    assert (error <= scales[..., None] * 0.50001 + 1e-30).all()
    assert codes.min() >= 1  # symmetric around 128


@settings(deadline=None)
@given(WEIGHTS)
def test_the_largest_weight_of_a_block_is_met_exactly(weight: NDArray[np.float32]) -> None:
    codes, scales = quantize_blocks(weight, 32)
    found = np.abs(dequantize_blocks(codes, scales)).max(-1)
    assert np.allclose(found, np.abs(weight).max(-1), rtol=1e-6, atol=0)


@settings(deadline=None)
@given(WEIGHTS)
def test_a_weight_of_a_linear_layer_is_met_to_half_a_step_or_cut(weight: NDArray[np.float32]) -> None:
    codes, scales = quantize_outputs(weight.T)  # (32, 3), (3,)
    assert codes.dtype == np.int8
    assert int(np.abs(codes).max(initial=0)) <= LARGEST_CODE  # 255 * 63 * 2 < 2**15: no product overflows
    inside = np.abs(weight.T) <= scales * LARGEST_CODE
    error = np.abs(codes * scales - weight.T)
    assert (error[inside] <= (scales * 0.50001 + 1e-30 + 0 * error)[inside]).all()
    assert (np.abs(codes) == LARGEST_CODE)[~inside].all()


@pytest.mark.parametrize(("inputs", "block"), [(256, 64), (320, 64), (96, 32), (48, 16), (40, None), (64, 64)])
def test_blocks_divide_the_inputs(inputs: int, block: int | None) -> None:
    assert block_size(inputs) == block


def test_linear_layers_and_embeddings_are_quantized(built: Built) -> None:
    for name, stage in built.stages.items():
        found = operators(stage.graph)
        assert "Gemm" not in found
        assert found["MatMulIntegerToFloat"] >= 2
        assert found["GatherBlockQuantized"] == (2 if name == "align" else 1)


def test_what_stays_fp32_is_named_with_the_reason(transformer: Built, bahdanau: Built) -> None:
    assert transformer.reports["encode"].kept == {
        "position_table": "a table of constants, not of trained weights"
    } or set(transformer.reports["encode"].kept) == {"position_table"}
    assert any("only 32 weights" in reason for reason in bahdanau.reports["step"].kept.values())
    assert bahdanau.reports["encode"].quantized["LSTM (stored int8, computed fp32)"] == 2


def external(file: Path) -> dict[str, tuple[int, int]]:
    """Where the large tensors of a graph lie: name -> (offset, length)."""
    found = {}
    for tensor in onnx.load(file, load_external_data=False).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            found[tensor.name] = (int(entries["offset"]), int(entries["length"]))
    return found


def node_inputs(file: Path, kind: str) -> list[list[str]]:
    return [list(node.input) for node in onnx.load(file, load_external_data=False).graph.node if node.op_type == kind]


def test_an_embedding_is_stored_once(transformer: Built) -> None:
    tables = []
    for stage in ("encode", "step", "align"):
        file = transformer.folder / transformer.files["int8"][stage]
        tables.extend(external(file)[inputs[0]] for inputs in node_inputs(file, "GatherBlockQuantized"))
    assert len(tables) == 4
    assert len(set(tables)) == 1


def test_layers_that_read_one_value_round_it_once(transformer: Built) -> None:
    found = operators(transformer.stages["encode"].graph)  # keys and values of both decoder layers read the memory
    assert found["MatMulIntegerToFloat"] == 2 + 2 + 2  # attention, feed-forward, memory projections
    assert found["QuantizeLinear"] == 2 + 2 + 1
    assert "Relu" not in found  # codes begin at zero


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_stages_share_the_weights_that_they_share(built: Built, precision: str) -> None:
    stages = {stage: external(built.folder / file) for stage, file in built.files[precision].items()}
    used = {place for places in stages.values() for place in places.values()}
    total = sum(-(-length // 64) * 64 for _, length in used)
    assert (built.folder / f"weights.{precision}.bin").stat().st_size == total
    assert set(stages["step"].values()) & set(stages["align"].values())


def test_int8_is_close_to_pytorch(built: Built) -> None:
    parity = measure_parity(built.model, built.sessions("int8"))
    assert 1e-5 < parity["step"] < 1  # of log-probabilities, over a vocabulary of random weights


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_case_40_57_a_row_does_not_depend_on_its_neighbours(built: Built, precision: str) -> None:
    assert check_independence(built.model, built.sessions(precision), tolerance=1e-5) <= 1e-5


def test_case_40_quantizing_whole_tensors_is_found_out(transformer: Built, tmp_path: Path) -> None:
    """The control: activations quantized over the batch, as `quantize_dynamic` does, must not pass."""
    files = transformer.files["fp32"]
    step = tmp_path / "step.onnx"
    quantize_dynamic(transformer.folder / files["step"], step, op_types_to_quantize=["MatMul", "Gemm"])
    assert operators(ir.load(step).graph)["DynamicQuantizeLinear"] > 5
    sessions = Sessions(transformer.folder, {"encode": files["encode"], "step": str(step)})
    with pytest.raises(ParityError, match="depend on its neighbours"):
        check_independence(transformer.model, sessions, tolerance=1e-5)
