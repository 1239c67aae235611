"""Recurrent modules of PyTorch in somebody's own architecture, as the exporter takes them."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from export.verify import check_parity, grid, measure_parity
from tests.export.bag_of_words import BagOfWords, Config
from tests.export.conftest import SIZES, build, shake
from training import ops
from training.models.base import Sizes, State


class GatedBag(BagOfWords):
    """The bag is the last states of a bidirectional nn.GRU, each direction's after its own last real position."""

    def __init__(self, config: Config, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.gru = nn.GRU(config.size, config.size // 2, batch_first=True, bidirectional=True)

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        embedded = self.source_embedding(source)  # (batch, source, size)
        if torch.compiler.is_exporting():
            gru = self.gru
            kinds = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
            both = (torch.stack([getattr(gru, kind), getattr(gru, f"{kind}_reverse")]) for kind in kinds)
            return {"bag": ops.gru(embedded, lengths, *both)[1]}
        packed = pack_padded_sequence(embedded, lengths.long(), batch_first=True, enforce_sorted=False)
        return {"bag": self.gru(packed)[1].transpose(0, 1).flatten(1)}  # (batch, size)


def test_case_24_a_gru_keeps_its_reset_gate_and_its_time_axis(tmp_path: Path) -> None:
    torch.manual_seed(24)
    built = build(shake(GatedBag(Config(), SIZES)), tmp_path)
    graph = onnx.load(tmp_path / built.files["fp32"]["encode"], load_external_data=False).graph
    (gru,) = (node for node in graph.node if node.op_type == "GRU")
    # PyTorch applies the reset gate after the matrix, which ONNX calls linear_before_reset.
    assert {a.name: a.i for a in gru.attribute if a.name == "linear_before_reset"} == {"linear_before_reset": 1}
    assert {cell.source.shape[1] for cell in grid(built.model)} == {1, 2, 6, 7, 50}
    parity = measure_parity(built.model, built.sessions("fp32"))
    check_parity(parity)
    assert parity["encode"] < 1e-5
