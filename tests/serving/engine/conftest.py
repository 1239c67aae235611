from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving.core.manifest import Bundle
from serving.engine.engine import Engine, EngineSettings
from serving.engine.observer import Observer
from serving.engine.sessions import Stages, open_stages
from tests.serving.engine.tiny import KINDS, SOURCE_LIMIT, TARGET_LIMIT, codec_model, codec_size, write_bundle

Opened = tuple[Bundle, Stages]


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Opened]:
    """A tiny bundle of each kind, and its graphs."""
    folder = tmp_path_factory.mktemp("bundles")
    bundles = {kind: write_bundle(folder / kind, kind) for kind in KINDS}
    return {kind: (bundle, open_stages(bundle, device="cpu", threads=1)) for kind, bundle in bundles.items()}


@pytest.fixture(params=list(KINDS))
def model(request: pytest.FixtureRequest, opened: dict[str, Opened]) -> Opened:
    """Each kind of model in turn."""
    return opened[request.param]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """A small model of each architecture, exported in fp32 and int8. Random weights, large enough to say something."""
    import torch

    from export.pipeline import Options, export_bundle
    from export.subject import Codecs, Subject
    from training.models.base import Sizes, find_architecture

    shapes = {
        "transformer": {"size": 64, "feed_forward": 128, "heads": 2, "encoder_layers": 1, "decoder_layers": 2},
        "bahdanau": {"embedding": 64, "hidden": 64, "attention": 64},
    }
    bundles = {}
    for name, shape in shapes.items():
        architecture = find_architecture(name)
        torch.manual_seed(0)
        sizes = Sizes(codec_size(), codec_size(), SOURCE_LIMIT, TARGET_LIMIT)
        model = architecture(architecture.Config(**shape), sizes).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        subject = Subject(model, Codecs.joint(codec_model()), name, shape, name)
        bundles[name] = export_bundle(subject, tmp_path_factory.mktemp("exported") / name, Options(gate=False))
    return bundles


class EngineMaker:
    """Starts engines and stops them when the test ends."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []

    def __call__(self, model: Opened, observer: Observer | None = None, start: bool = True, **limits: int) -> Engine:
        limits = {"rows": 16, "memory_bytes": 64 << 20, **limits}
        engine = Engine(*model, EngineSettings(**limits), observer)
        self.engines.append(engine)
        if start:
            engine.start()
        return engine


@pytest.fixture
def make_engine() -> Iterator[EngineMaker]:
    """Makes engines: `make_engine(model, observer, rows=..., queue=...)`."""
    maker = EngineMaker()
    yield maker
    for engine in maker.engines:
        engine.stop()
