"""Fused operators stand where they are expected, and masked rows stay finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from export.errors import ExportError
from export.fusions import fuse
from export.nodes import operators
from export.sessions import Sessions
from export.verify import check_levels, check_parity, measure_parity
from tests.export.bag_of_words import BagOfWords, Config
from tests.export.conftest import SIZES, Built, build, shake
from training.models.base import State


def test_the_transformer_has_one_operator_for_each_attention(transformer: Built) -> None:
    found = {name: operators(stage.graph) for name, stage in transformer.stages.items()}
    assert found["encode"]["Attention"] == 1
    assert found["step"]["GroupQueryAttention"] == 4
    assert found["align"]["Attention"] == 4  # the last layer's cross-attention is asked for its weights only
    assert found["encode"]["LayerNormalization"] == 3
    assert found["step"]["LayerNormalization"] == 7
    assert "Softmax" not in found["encode"]
    assert "Softmax" not in found["step"]
    # Lengths instead of a mask, and no transpose but those of the memory's layout.
    assert "Less" not in found["encode"]
    assert found["encode"]["Transpose"] == 4
    assert transformer.fusions["step"]["packed projections"] == 2


def test_the_step_adds_the_axis_of_the_position_once_and_takes_it_away_once(transformer: Built) -> None:
    found = operators(transformer.stages["step"].graph)
    unsqueezed = found["Unsqueeze"] - 1  # one belongs to the search head
    assert (unsqueezed, found["Squeeze"]) == (2, 1)  # in front: for the first projection and the first sum


def test_tables_are_looked_up_without_detours(transformer: Built) -> None:
    found = operators(transformer.stages["step"].graph)
    assert found["Cast"] == 2  # sizes of the two kinds of buffers
    assert found["GatherND"] == 1  # of the search head
    assert "Mul" not in found  # the embedding's scale is part of its codes' scales


def test_the_recurrent_encoder_is_one_operator(bahdanau: Built) -> None:
    found = operators(bahdanau.stages["encode"].graph)
    assert found["LSTM"] == 1
    assert "Scan" not in found
    assert found["Transpose"] == 3  # the operator wants (time, batch, size)


def test_a_count_that_does_not_fit_stops_the_export(transformer: Built) -> None:
    stage = transformer.stages["encode"]
    calls = dict(stage.calls)
    stage.calls["aten.layer_norm.default"] += 1
    try:
        with pytest.raises(ExportError, match="4 LayerNormalization expected from the PyTorch program, 3 found"):
            fuse(stage)
    finally:
        stage.calls = calls


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_case_35_a_row_with_nothing_live_stays_finite_and_hurts_nobody(built: Built, precision: str) -> None:
    sessions = built.sessions(precision)
    source = np.random.default_rng(0).integers(4, 1000, (3, 6))
    whole = sessions.encode(source, np.array([6, 4, 3], np.int32))
    masked = sessions.encode(source, np.array([6, 0, 3], np.int32))
    for name, array in masked.items():
        assert np.isfinite(array).all(), name
        if name != "source_length":
            assert np.array_equal(array[[0, 2]], whole[name][[0, 2]]), name


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_case_90_the_runtimes_own_optimisations_change_nothing(built: Built, precision: str) -> None:
    assert check_levels(built.folder, built.files[precision], built.model) < 1e-5


class MaskingModel(BagOfWords):
    """Attends over whatever is not padding by its id: a mask that is no comparison with lengths."""

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        x = self.source_embedding(source)[:, None]  # (batch, 1, source, size)
        live = torch.arange(source.shape[1]) < lengths[:, None]
        odd = (live & (source % 2 == 1)) | (torch.arange(source.shape[1]) == 0)  # (batch, source)
        attended = functional.scaled_dot_product_attention(x, x, x, attn_mask=odd[:, None, None, :])
        return {"bag": (attended.squeeze(1) * live[..., None]).sum(1) / lengths[:, None]}


def test_an_unknown_mask_stays_a_mask(tmp_path: Path) -> None:
    built = build(shake(MaskingModel(Config(16), SIZES)), tmp_path)
    assert operators(built.stages["encode"].graph)["Attention"] == 1
    assert "attention by length" not in built.fusions["encode"]
    check_parity(measure_parity(built.model, Sessions(built.folder, built.files["fp32"])))
