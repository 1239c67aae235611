"""Hugging Face transformers: `generate`, as most people first run such a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.formats import huggingface as models
from benchmarks.peers.base import Ids, Peer, Search, Setting, Weights, thread_counts


class HuggingFace(Peer):
    """`model.generate`, with its cache. Setting: dtype, threads."""

    name = "Hugging Face generate"
    package = "transformers"
    module = "transformers"
    exact = {"dtype": "float32", "threads": 1}

    def __init__(self, weights: Weights, setting: Setting) -> None:
        super().__init__(weights, setting)
        import torch

        torch.set_num_threads(setting["threads"])
        self._device = setting.get("device", "cpu")
        self._model = models.load(weights, setting["dtype"]).to(self._device)

    @classmethod
    def settings(cls, cores: int, batch: int) -> list[Setting]:
        """fp32 and bf16, one thread or several."""
        return [{"dtype": d, "threads": t} for d in ("float32", "bfloat16") for t in thread_counts(cores)]

    def prepare(self, batch: Ids) -> Any:
        """Right-padded ids and their mask, both (batch, source)."""
        import torch

        longest = max(map(len, batch))
        ids = torch.full((len(batch), longest), self.weights.pad)
        mask = torch.zeros_like(ids)
        for row, source in enumerate(batch):
            ids[row, : len(source)] = torch.tensor(source)
            mask[row, : len(source)] = 1
        return ids.to(self._device), mask.to(self._device)

    def run(self, prepared: Any, search: Search) -> Any:
        """Deterministic beam search without length penalty."""
        import torch

        ids, mask = prepared
        with torch.inference_mode():
            return self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                num_beams=search.beam,
                do_sample=False,
                length_penalty=0.0,
                early_stopping=False,
                max_length=None,
                max_new_tokens=search.forced or search.limit,
                min_new_tokens=search.forced or None,
                forced_bos_token_id=None,
                forced_eos_token_id=None,
            ).tolist()

    def outputs(self, raw: Any) -> Ids:
        """Without the start symbol, the end symbol and what pads behind it."""
        found = []
        for row in raw:
            row = row[1:]
            end = row.index(self.weights.eos) if self.weights.eos in row else len(row)
            found.append([token for token in row[:end] if token != self.weights.pad])
        return found

    def files(self) -> list[Path]:
        return [models.folder_of(self.weights)]
