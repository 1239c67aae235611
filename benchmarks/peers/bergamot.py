"""bergamot-translator: Marian for the browser and the desktop, with int8 kernels of its own.

Its wheels end at Python 3.10, so it runs under an interpreter of its own (see `benchmarks.contenders`). Its package
asks the network for models when it is imported: only the extension module in it is loaded. It takes and gives text.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Ids, Peer, Search, Setting, Weights, thread_counts

FOLDER, MODEL, VOCABULARY, PIECES = "bergamot", "model.npz", "vocab.spm", "pieces.json"  # as formats.marian writes


def extension() -> Any:
    """The extension module, without the package around it."""
    package = importlib.util.find_spec("bergamot")
    assert package is not None
    assert package.submodule_search_locations is not None
    [path] = Path(package.submodule_search_locations[0]).glob("_bergamot*.so")
    spec = importlib.util.spec_from_file_location("_bergamot", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_bergamot"] = module
    spec.loader.exec_module(module)
    return module


class Bergamot(Peer):
    """`Service.translate`. Setting: precision, workers."""

    name = "bergamot"
    package = "bergamot"
    module = "bergamot"
    exact = None  # its sinusoids are not those of the checkpoint

    def __init__(self, weights: Weights, setting: Setting) -> None:
        super().__init__(weights, setting)
        self._folder = weights.path(FOLDER)
        self._pieces = json.loads((self._folder / PIECES).read_text(encoding="utf-8"))
        self._ids = {piece: index for index, piece in enumerate(self._pieces)}
        self._module = extension()
        self._service = self._module.Service(
            self._module.ServiceConfig(numWorkers=setting["workers"], logLevel="off", cacheSize=0)
        )
        self._options = self._module.ResponseOptions(alignment=False, qualityScores=False, HTML=False)
        self._models: dict[tuple[int, int, int], Any] = {}

    @classmethod
    def settings(cls, cores: int, batch: int) -> list[Setting]:
        return [
            {"precision": precision, "workers": workers}
            for precision in ("int8shiftAll", "float32")
            for workers in thread_counts(cores)
        ]

    def _model(self, search: Search, rows: int, longest: int) -> Any:
        """The model for a search: beam and batches belong to a model here."""
        key = (search.beam, rows, longest)
        if key not in self._models:
            factor = search.forced / longest if search.forced else 2.0
            config = {
                "models": [str(self._folder / MODEL)], "vocabs": [str(self._folder / VOCABULARY)] * 2,
                "beam-size": search.beam, "normalize": 0.0, "word-penalty": 0.0, "skip-cost": True,
                "max-length-factor": factor, "max-length-break": longest, "workspace": 256, "quiet": True,
                "mini-batch-words": max(1, -(-rows // self.setting["workers"])) * longest,
                "gemm-precision": self.setting["precision"], "ssplit-mode": "sentence", "alignment": "soft",
            }  # fmt: skip
            self._models[key] = self._service.modelFromConfig(json.dumps(config))
        return self._models[key]

    def prepare(self, batch: Ids) -> Any:
        """Text, and its longest source in tokens."""
        texts = ["".join(self._pieces[i] for i in row[:-1]).replace("▁", " ").strip() for row in batch]
        return self._module.VectorString(texts), len(texts), max(map(len, batch))

    def translate(self, batch: Ids, search: Search) -> Any:
        """As every peer, the model made before the clock runs."""
        self._model(search, len(batch), max(map(len, batch)))
        return super().translate(batch, search)

    def run(self, prepared: Any, search: Search) -> Any:
        texts, rows, longest = prepared
        return self._service.translate(self._model(search, rows, longest), texts, self._options)

    def outputs(self, raw: Any) -> Ids:
        """Text back to ids."""
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(self._folder / VOCABULARY))
        unknown = self._ids["<unk>"]
        texts = [response.target.text for response in raw]
        return [[self._ids.get(p, unknown) for p in processor.encode(text, out_type=str)] for text in texts]

    def files(self) -> list[Path]:
        return [self._folder / MODEL, self._folder / VOCABULARY]
