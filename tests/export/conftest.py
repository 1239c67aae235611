"""Both models exported once, small, with weights that no two tensors share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from export.calibrate import calibrate, random_sources
from export.fusions import fuse
from export.graphs import Stage, build_stages, trained_tables
from export.heads import add_search_head
from export.quantize import Report, quantize
from export.sessions import Sessions
from export.weights import save_graphs
from training.models.bahdanau import Bahdanau
from training.models.bahdanau import Config as BahdanauConfig
from training.models.base import Model, Sizes
from training.models.transformer import Config as TransformerConfig
from training.models.transformer import Transformer

SIZES = Sizes(source_vocabulary=1040, target_vocabulary=1040, source_limit=60, target_limit=110)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Built:
    """A model and what its export left at each station."""

    model: Model
    stages: dict[str, Stage]  # quantized by now
    fusions: dict[str, dict[str, int]]
    reports: dict[str, Report]
    folder: Path
    files: dict[str, dict[str, str]]  # precision -> stage -> file

    def sessions(self, precision: str) -> Sessions:
        return Sessions(self.folder, self.files[precision])


def shake(model: Model, seed: int = 0) -> Model:
    """Weights of the size that training leaves, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def build(model: Model, folder: Path) -> Built:
    """All stations of an export but the bundle."""
    stages = build_stages(model)
    fusions = {name: fuse(stage) for name, stage in stages.items()}
    add_search_head(stages["step"])
    files = {precision: {stage: f"{stage}.{precision}.onnx" for stage in stages} for precision in ("fp32", "int8")}

    def save(precision: str) -> None:
        graphs = {files[precision][name]: stage.model for name, stage in stages.items()}
        save_graphs(folder, graphs, f"weights.{precision}.bin")

    save("fp32")
    tables = trained_tables(model)
    ranges = calibrate(stages, folder, model.state_spec(), model.sizes, random_sources(model.sizes, 12))
    reports = {name: quantize(stage, tables, ranges) for name, stage in stages.items()}
    save("int8")
    return Built(model, stages, fusions, reports, folder, files)


@pytest.fixture(scope="session")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Built:
    torch.manual_seed(1)
    config = TransformerConfig(size=32, feed_forward=64, heads=4, encoder_layers=1, decoder_layers=2)
    return build(shake(Transformer(config, SIZES)), tmp_path_factory.mktemp("transformer"))


@pytest.fixture(scope="session")
def bahdanau(tmp_path_factory: pytest.TempPathFactory) -> Built:
    torch.manual_seed(1)
    return build(shake(Bahdanau(BahdanauConfig(32, 48, 32), SIZES)), tmp_path_factory.mktemp("bahdanau"))


@pytest.fixture(params=["transformer", "bahdanau"])
def built(request: pytest.FixtureRequest) -> Built:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Built)
    return found
