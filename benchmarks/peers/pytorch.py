"""PyTorch without an engine: the plain model and a loop, eager or compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.base import Ids, Peer, Search, Setting, Weights, thread_counts


class Eager(Peer):
    """The plain model in eager mode. Setting: threads, dtype, device."""

    name = "PyTorch eager"
    package = "torch"
    module = "torch"
    exact = {"threads": 1}
    compiled = False

    def __init__(self, weights: Weights, setting: Setting) -> None:
        super().__init__(weights, setting)
        import torch

        from benchmarks import plain

        torch.set_num_threads(setting.get("threads", 1))
        self._torch, self._plain = torch, plain
        self._device = setting.get("device", "cpu")
        model = plain.load(weights).to(self._device, getattr(torch, setting.get("dtype", "float32")))
        encode, step = model.encode, model.step
        if self.compiled:
            encode = torch.compile(encode, dynamic=True)
            step = torch.compile(step, dynamic=True)
        self._loop = plain.GreedyLoop(encode, model.first_state, step, weights, plain.banned_of(weights))

    @classmethod
    def settings(cls, cores: int, batch: int) -> list[Setting]:
        return [{"threads": threads, "dtype": d} for threads in thread_counts(cores) for d in ("float32", "bfloat16")]

    def prepare(self, batch: Ids) -> Any:
        """Padded ids and their mask on the device."""
        return self._plain.pad_batch(batch, self.weights.pad, self._device)

    def run(self, prepared: Any, search: Search) -> Any:
        source, mask = prepared
        with self._torch.inference_mode():
            return self._loop(source, mask, search).tolist()  # waits for the device

    def outputs(self, raw: Any) -> Ids:
        return self._plain.until_end(raw, self.weights.eos)

    def files(self) -> list[Path]:
        if self.weights.form == "bahdanau":
            from benchmarks.models import RECURRENT

            return [self.weights.path(RECURRENT)]
        from benchmarks.formats.huggingface import folder_of

        return [folder_of(self.weights)]


class Compiled(Eager):
    """The same after `torch.compile`, with sizes left open: a cache grows with every step."""

    name = "PyTorch compiled"
    compiled = True
