"""The models of a server: each a bundle, its engine and its translator, found by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.config import Settings
from serving.core.errors import ConfigError, NotFound
from serving.core.manifest import Manifest, open_bundle
from serving.engine.observer import Silent
from serving.engine.pool import Pool, share_out
from serving.engine.sessions import open_stages, share_threads
from serving.engine.settings import EngineSettings
from serving.engine.translator import Translator
from serving.metrics import Load, Metrics


@dataclass(frozen=True, slots=True)
class Model:
    """One model in use."""

    engine: Pool
    translator: Translator

    @property
    def manifest(self) -> Manifest:
        """What the bundle says of itself."""
        return self.engine.bundle.manifest

    @property
    def name(self) -> str:
        """Name by which requests choose it."""
        return self.manifest.name

    @property
    def precision(self) -> str:
        """Precision of the graphs in use."""
        return self.engine.stages.precision

    @property
    def device(self) -> str:
        """Device that runs them."""
        return self.engine.stages.device

    def load(self) -> Load:
        """What the engine has to do now."""
        now = self.engine.snapshot()
        return Load(now.queued, now.rows)

    def __str__(self) -> str:
        return f"{self.name} {self.manifest.version} ({self.manifest.architecture}, {self.precision}, {self.device})"


class _StepMetrics(Silent):
    """Passes an engine's steps on to the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def stepped(self, rows: int, seconds: float) -> None:
        self._metrics.step_done(rows, seconds)


class Registry:
    """The models that are open, the default one first."""

    def __init__(self, settings: Settings, metrics: Metrics, *, share: bool = False) -> None:
        """No model yet.

        Args:
            share: whether all models use one pool of threads, which is then the process's for good.
        """
        self._share = share
        self._settings = settings
        self._metrics = metrics
        self._models: dict[str, Model] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def get(self, name: str = "") -> Model:
        """The model of that name, the default for "".

        Raises:
            NotFound: there is none.
        """
        if not name and self._models:
            return next(iter(self._models.values()))
        if name not in self._models:
            raise NotFound(f"no model {name!r}; this server has {', '.join(self._models) or 'none'}")
        return self._models[name]

    def open(self, bundles: Sequence[Path]) -> None:
        """Open and warm up the bundles; the first one is the default.

        Raises:
            FuseqError: a bundle cannot be used, or two have one name.
        """
        if self._share:
            share_threads(share_out(self._settings.workers, self._settings.threads)[1])
        for path in bundles:
            model = self._open(path)
            with self._lock:
                self._models[model.name] = model
            self._metrics.add_model((model.name, model.manifest.version, model.precision, model.device), model.load)

    def _open(self, path: Path) -> Model:
        settings = self._settings
        bundle = open_bundle(path)
        name = bundle.manifest.name
        if name in self._models:
            raise ConfigError(f"bundle {path}: a model named {name!r} is open already; names must differ")
        workers, threads = share_out(settings.workers, settings.threads)
        stages = open_stages(bundle, settings.precision or None, settings.device, threads)
        if stages.device == "cuda":  # one device, which runs one call at a time
            workers = settings.workers or 1
        limits = EngineSettings(rows=settings.rows, queue=settings.queue, memory_bytes=settings.memory_mib << 20)
        engine = Pool(bundle, stages, limits, _StepMetrics(self._metrics), workers)
        engine.start()
        return Model(engine, Translator(bundle, engine))

    def stop(self) -> None:
        """Stop every engine at once; what they had not finished ends as Unavailable."""
        for model in self:
            model.engine.stop()
