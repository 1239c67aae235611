"""The training loop: steps, evaluations, snapshots, and exact resumption.

Everything the next step depends on is in `Progress` and `state.pt`, and in the snapshots that it names. An evaluation
happens between two saves and touches no random state, so a run killed at any moment and resumed repeats, from its
last save, exactly the steps and evaluations that the uninterrupted run made.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from serving.core.errors import ConfigError, FuseqError
from training import loss as losses
from training.batching import Batch, Batches, IdPair, make_batch
from training.checkpoint import average, load_tensors, save_tensors, write_atomically
from training.config import Config
from training.models.base import Model
from training.optim import make_optimisers, rate_factor, set_rates

Evaluate = Callable[[Model], dict[str, float]]
Entry = dict[str, Any]


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0  # optimiser steps taken
    epoch: int = 0
    batch: int = 0  # next batch of the epoch
    tokens: int = 0  # real tokens seen, both sides
    loss_sum: float = 0.0  # since the last report
    loss_count: int = 0
    best: dict[str, float] = field(default_factory=dict)
    stale: int = 0  # evaluations since the best
    snapshots: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """What an observer of the loop is told after each step."""

    step: int
    steps: int
    loss: float
    tokens: int
    rate: float


class Loop:
    """One run of training in a folder."""

    def __init__(
        self,
        run: Path,
        config: Config,
        model: Model,
        pairs: Sequence[IdPair],
        evaluate: Evaluate,
        on_entry: Callable[[Entry], object] = lambda entry: None,
    ) -> None:
        """Prepare a run from its beginning.

        Args:
            evaluate: scores of a model, `bleu` among them; must draw no random numbers.
            on_entry: told of each evaluation once it is in the log; what it raises ends the run.
        """
        self.run, self.config, self.model, self.pairs = run, config, model, pairs
        self.evaluate, self.on_entry = evaluate, on_entry
        self.batches = Batches(pairs, config.batches.tokens, config.batches.pool, config.run.seed)
        self.optimisers = make_optimisers(model, config.optimiser)
        self.progress = Progress()
        self.saved_snapshots: list[int] = []  # that state.pt names
        self.device = pick_device(config.run.device)
        self.model.to(self.device)
        self.autocast = use_bf16(config.run.precision, self.device)

    def resume(self) -> None:
        """Take up the run where `state.pt` left it; a run without one starts from the beginning."""
        if (self.run / "state.pt").is_file():
            self._restore(load_tensors(self.run / "state.pt"))
        self._forget_later_log()

    def _restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        for optimiser, state in zip(self.optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.progress = progress = Progress(**saved["progress"])
        # A run that came to its end goes on where the configuration has more steps or more patience now.
        too_long = progress.stale >= self.config.evaluation.patience
        progress.finished = too_long or progress.step >= self.config.schedule.steps
        self.saved_snapshots = progress.snapshots
        torch.set_rng_state(saved["random"])
        if saved["random_cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(saved["random_cuda"])

    def fit(self, on_step: Callable[[Tick], object] = lambda tick: None) -> Progress:
        """Run to the end: the last step of the schedule, or no better BLEU for `patience` evaluations."""
        progress, config = self.progress, self.config
        while not progress.finished:
            order = self.batches.epoch(progress.epoch)
            while progress.batch < len(order) and not progress.finished:
                batch = make_batch([self.pairs[i] for i in order[progress.batch]], self.model.sizes.special)
                value = self._step(batch)
                progress.batch += 1
                last = progress.step >= config.schedule.steps
                on_step(Tick(progress.step, config.schedule.steps, value, progress.tokens, self._rate()))
                if progress.step % config.evaluation.every == 0 or last:
                    self._evaluate()
                progress.finished = progress.finished or last
                if progress.step % config.run.save_every == 0 or progress.finished:
                    self.save()
            if progress.batch >= len(order):
                progress.epoch, progress.batch = progress.epoch + 1, 0
        return progress

    def save(self) -> None:
        """Write everything the next step depends on."""
        cuda = torch.cuda.get_rng_state_all() if self.device.type == "cuda" else None
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "progress": asdict(self.progress),
            "random": torch.get_rng_state(),
            "random_cuda": cuda,
        }
        save_tensors(self.run / "state.pt", state)
        self.saved_snapshots = self.progress.snapshots

    def _rate(self) -> float:
        return rate_factor(self.progress.step, self.config.schedule)

    def _step(self, batch: Batch) -> float:
        """One optimiser step; the batch's loss per token."""
        self.model.train()
        settings, progress = self.config.optimiser, self.progress
        set_rates(self.optimisers, self._rate())
        batch = batch.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(batch.source, batch.lengths, batch.target)  # (batch, target, vocabulary)
        pad = self.model.sizes.special.pad
        loss, count = losses.cross_entropy(logits, batch.labels, pad, settings.label_smoothing)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        value = float(loss.detach())
        if not (math.isfinite(value) and math.isfinite(float(norm))):  # before it reaches the weights, and a save
            raise FuseqError(f"loss or gradient is not a number at step {progress.step}; lower optimiser.rate")
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += batch.tokens
        progress.loss_sum += value * count
        progress.loss_count += count
        return value

    def _evaluate(self) -> None:
        """Snapshot, average the last ones, measure, keep the best."""
        progress, settings = self.progress, self.config.evaluation
        self._take_snapshot()
        weights = average([load_tensors(self._snapshot(step))["weights"] for step in progress.snapshots])
        current = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(weights)
        self.model.eval()
        try:
            scores = self.evaluate(self.model)
        finally:
            self.model.load_state_dict(current)
        entry = {"step": progress.step, "tokens": progress.tokens, "epoch": progress.epoch, **scores}
        entry["train_loss"] = progress.loss_sum / max(1, progress.loss_count)
        entry["rate"] = self._rate()
        progress.loss_sum, progress.loss_count = 0.0, 0
        if scores["bleu"] > progress.best.get("bleu", -1.0):
            progress.best, progress.stale = {**scores, "step": progress.step}, 0
            save_tensors(self.run / "best.pt", {"weights": weights, "step": progress.step, "scores": scores})
        else:
            progress.stale += 1
        progress.finished = progress.stale >= settings.patience
        self._log(entry)
        self.on_entry(entry)

    def _snapshot(self, step: int) -> Path:
        return self.run / "snapshots" / f"{step}.pt"

    def _take_snapshot(self) -> None:
        progress = self.progress
        save_tensors(self._snapshot(progress.step), {"weights": self.model.state_dict(), "step": progress.step})
        progress.snapshots = [*progress.snapshots, progress.step][-self.config.evaluation.average :]
        spared = {*progress.snapshots, *self.saved_snapshots}  # a resumed run needs those of its last save
        for file in (self.run / "snapshots").glob("*.pt"):
            if file.stem.isdigit() and int(file.stem) not in spared:
                file.unlink()

    def _log(self, entry: Entry) -> None:
        with (self.run / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "time": round(time.time())}) + "\n")

    def _forget_later_log(self) -> None:
        """Drop log lines of steps that will be made again."""
        kept = [entry for entry in read_log(self.run) if entry["step"] <= self.progress.step]
        text = "".join(json.dumps(entry) + "\n" for entry in kept)
        write_atomically(self.run / "log.jsonl", lambda file: file.write(text.encode()))


def read_log(run: Path) -> list[Entry]:
    """The evaluations of a run; a half-written last line is ignored."""
    path = run / "log.jsonl"
    entries: list[Entry] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def pick_device(wanted: str) -> torch.device:
    """The device asked for.

    Raises:
        ConfigError: CUDA was asked for and is not there.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("run.device is cuda, but torch sees no CUDA device; say cpu, or install torch for CUDA")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def use_bf16(wanted: str, device: torch.device) -> bool:
    """Whether to autocast to bfloat16: asked for, or fast on the device."""
    if wanted != "auto":
        return wanted == "bf16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # torch has no public way to ask
    return bool(supported()) if supported else False
