"""CTranslate2: a C++ engine for Transformers, with its own int8 kernels."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.formats import ctranslate2 as models
from benchmarks.peers.base import MOST_AT_ONCE, Ids, Peer, Search, Setting, Weights, thread_counts


class CTranslate2(Peer):
    """`Translator.translate_batch`. Setting: quantization, inter and intra threads, split of the batch, backend."""

    name = "CTranslate2"
    package = "ctranslate2"
    module = "ctranslate2"
    exact = {"quantization": "float32", "inter": 1, "intra": 1, "split": 0}

    def __init__(self, weights: Weights, setting: Setting) -> None:
        super().__init__(weights, setting)
        import ctranslate2

        self._folder = models.folder_of(weights, setting["quantization"])
        self._tokens = json.loads((self._folder / models.VOCABULARY).read_text(encoding="utf-8"))
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        self._translator = ctranslate2.Translator(
            str(self._folder),
            device=setting.get("device", "cpu"),
            compute_type=setting["quantization"],
            inter_threads=setting["inter"],
            intra_threads=setting["intra"],
        )

    @classmethod
    def settings(cls, cores: int, batch: int) -> list[Setting]:
        """int8 and float32, with the library's own choice of backend and with MKL, one worker or several."""
        threads = [(1, intra) for intra in thread_counts(cores)]
        if batch > 1:
            threads += [(inter, cores // inter) for inter in thread_counts(cores) if inter > 1]
        return [
            {"quantization": quantization, "inter": inter, "intra": intra, "split": split, **environment}
            for quantization in ("int8", "float32", "int16")
            for inter, intra in threads
            for split in _splits(batch, inter)
            for environment in ({}, {"env": {"CT2_USE_MKL": "1"}})
        ]

    def prepare(self, batch: Ids) -> list[list[str]]:
        """It takes tokens, not ids."""
        return [[self._tokens[i] for i in row] for row in batch]

    def run(self, prepared: list[list[str]], search: Search) -> Any:
        """One call for the whole batch."""
        return self._translator.translate_batch(
            prepared,
            beam_size=search.beam,
            length_penalty=0.0,
            max_batch_size=self.setting["split"],
            max_input_length=0,
            max_decoding_length=search.forced or search.limit,
            min_decoding_length=search.forced or 1,
        )

    def join(self, long: Ids, short: list[int], limits: tuple[int, int]) -> dict[str, float]:
        """Seconds of a short sentence that comes while long ones are decoded, and of the long ones."""
        begin = time.perf_counter()
        first = self._asynchronous(long, limits[0])
        time.sleep(0.002)  # they run
        sent = time.perf_counter()
        [second] = self._asynchronous([short], limits[1])
        second.result()
        took = time.perf_counter() - sent
        for result in first:
            result.result()
        return {"short": took, "long": time.perf_counter() - begin}

    def _asynchronous(self, batch: Ids, forced: int) -> Any:
        split = -(-len(batch) // self.setting["inter"])  # long ones keep every worker busy
        return self._translator.translate_batch(
            self.prepare(batch),
            max_batch_size=split,
            beam_size=1,
            max_decoding_length=forced,
            min_decoding_length=forced,
            asynchronous=True,
        )

    def outputs(self, raw: Any) -> Ids:
        """Tokens to ids."""
        return [[self._ids[token] for token in result.hypotheses[0]] for result in raw]

    def files(self) -> list[Path]:
        return [self._folder]


def _splits(batch: int, workers: int) -> list[int]:
    """Sizes that a batch may be cut to: a part for each worker, of very many sentences sorted parts; 0 cuts none."""
    if batch > MOST_AT_ONCE:
        return [32, 64, 128]
    return [-(-batch // workers)] if workers > 1 else [0]
