"""PyTorch to ONNX: nothing frozen, nothing random, nothing of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import export
from export.errors import ExportError
from export.graphs import build_stages
from export.nodes import operators
from export.verify import (
    BATCHES,
    LENGTHS,
    check_independence,
    check_levels,
    check_parity,
    grid,
    measure_parity,
)
from tests.export.bag_of_words import BagOfWords, Config
from tests.export.conftest import SIZES, Built, build, shake
from training.models.base import Sizes, State
from training.models.transformer import Config as TransformerConfig
from training.models.transformer import Transformer


def test_case_25_27_every_stage_equals_pytorch_on_the_grid(built: Built) -> None:
    cells = list(grid(built.model))
    assert [cell.source.shape for cell in cells] == [(batch, length) for length in LENGTHS for batch in BATCHES]
    parity = measure_parity(built.model, built.sessions("fp32"))
    assert set(parity) == {"encode", "step", "align"}
    check_parity(parity)
    assert max(parity.values()) < 2e-5


def test_case_26_named_axes_stay_symbolic(built: Built) -> None:
    spec = {tensor.name: tensor.axes for tensor in built.model.state_spec()}
    for stage, file in built.files["fp32"].items():
        graph = onnx.load(built.folder / file, load_external_data=False).graph
        ports = {value.name: value for value in (*graph.input, *graph.output)}
        for name, value in ports.items():
            axes = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            assert axes == list(spec.get(name.removeprefix("next."), axes)), f"{stage}: {name}"
            assert axes == [1] if name == "k" else axes[0] == "row"
        assert {"align": {"alignment"}, "encode": set(ports) & set(spec)}.get(stage, {"top_tokens"}) <= set(ports)


def test_a_step_names_every_tensor_that_it_replaces(transformer: Built) -> None:
    names = [port.name for port in transformer.stages["step"].outputs]
    assert names[:2] == ["top_tokens", "top_scores"]
    # Caches are written in place, and cross-attention writes back what stands in the memory.
    read_only = ("source_length", "last_key", "last_value")
    expected = {f"next.{t.name}" for t in transformer.model.state_spec() if not t.name.startswith(read_only)}
    assert set(names[2:]) == expected


class LoopingModel(BagOfWords):
    """Walks over the source in Python."""

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        bag = torch.zeros(source.shape[0], self.config.size)
        for position in range(source.shape[1]):
            bag = bag + self.source_embedding(source[:, position]) * (position < lengths)[:, None]
        return {"bag": bag}


def test_case_25_a_frozen_axis_stops_the_export() -> None:
    with pytest.raises(ExportError, match=r"stage encode.*source") as caught:
        build_stages(LoopingModel(Config(16), SIZES))
    assert "\n" not in str(caught.value)


class DroppingModel(BagOfWords):
    """Drops values even when it is evaluated."""

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        return {"bag": functional.dropout(super().encode(source, lengths)["bag"], 0.5, training=True)}


def test_case_33_dropout_that_is_always_active_stops_the_export() -> None:
    with pytest.raises(ExportError, match="dropout"):
        build_stages(DroppingModel(Config(16), SIZES))


class RegularisedModel(BagOfWords):
    """Has a dropout layer, as most do."""

    def __init__(self, config: Config, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.dropout = nn.Dropout(0.5)

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        return {"bag": self.dropout(super().encode(source, lengths)["bag"])}


def test_case_33_a_model_left_in_training_mode_is_evaluated(tmp_path: Path) -> None:
    built = build(RegularisedModel(Config(16), SIZES).train(), tmp_path)
    for stage in built.stages.values():
        assert "Dropout" not in operators(stage.graph)
    check_parity(measure_parity(built.model.eval(), built.sessions("fp32")))


def test_graphs_are_valid_onnx(built: Built) -> None:
    for files in built.files.values():
        for file in files.values():
            onnx.checker.check_model(built.folder / file, full_check=False)


def test_no_loop_where_it_would_cost(built: Built) -> None:
    for name in ("encode", "step"):
        assert not {"Loop", "Scan", "If"} & set(operators(built.stages[name].graph))


def test_graphs_hold_nothing_of_the_machine(built: Built) -> None:
    root = str(Path(export.__file__).parent.parent).encode()
    for files in built.files.values():
        for file in files.values():
            content = (built.folder / file).read_bytes()
            assert root not in content
            assert b"site-packages" not in content
            assert b"stack_trace" not in content


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"pre_norm": False}, {"tied": False}, {"heads": 1, "encoder_layers": 3}],
    ids=lambda options: str(options),
)
def test_variants_of_the_transformer_equal_pytorch(options: dict[str, Any], tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"size": 32, "feed_forward": 48, "heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    built = build(shake(Transformer(TransformerConfig(**sizes | options), SIZES)), tmp_path)
    check_parity(measure_parity(built.model, built.sessions("fp32")))
    for precision in ("fp32", "int8"):
        check_independence(built.model, built.sessions(precision), 1e-5)
        check_levels(built.folder, built.files[precision], built.model)
