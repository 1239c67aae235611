"""Hugging Face transformers: `generate`, as most people first run such a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.formats import huggingface as models
from benchmarks.peers.base import MOST_AT_ONCE, Ids, Peer, Search, Setting, Weights, thread_counts


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
        splits = (32, 64, 128) if batch > MOST_AT_ONCE else (0,)
        return [
            {"dtype": dtype, "threads": threads, "split": split}
            for dtype in ("float32", "bfloat16")
            for threads in thread_counts(cores)
            for split in splits
        ]

    def prepare(self, batch: Ids) -> Any:
        """Parts of sources of similar length, each with the places of its sources in the batch."""
        order = sorted(range(len(batch)), key=lambda index: -len(batch[index]))
        size = self.setting.get("split") or min(len(batch), MOST_AT_ONCE)
        parts = [order[first : first + size] for first in range(0, len(order), size)]
        return [(part, *self._padded([batch[index] for index in part])) for part in parts]

    def _padded(self, batch: Ids) -> Any:
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
        """Every part by deterministic beam search without length penalty."""
        return [(part, self._generate(ids, mask, search)) for part, ids, mask in prepared]

    def _generate(self, ids: Any, mask: Any, search: Search) -> Any:
        import torch

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
        """In the batch's order, without the start symbol, the end symbol and what pads behind it."""
        found: Ids = [[]] * sum(len(part) for part, _ in raw)
        for part, rows in raw:
            for index, row in zip(part, rows, strict=True):
                row = row[1:]
                end = row.index(self.weights.eos) if self.weights.eos in row else len(row)
                found[index] = [token for token in row[:end] if token != self.weights.pad]
        return found

    def files(self) -> list[Path]:
        return [models.folder_of(self.weights)]
