"""The training loop: steps, evaluations, snapshots, and exact resumption.

Everything the next step depends on is in `Progress` and `state.pt`. An evaluation happens between two saves and
touches no random state, so a run killed at any moment and resumed repeats, from its last save, exactly the steps
and evaluations that the uninterrupted run made.
"""

from __future__ import annotations

import contextlib
import json
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
from training.checkpoint import average, load_tensors, save_tensors
from training.config import Config
from training.models.base import Model
from training.optim import make_optimisers, rate_factor, set_rates

Evaluate = Callable[[Model], dict[str, float]]


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

    def __init__(self, run: Path, config: Config, model: Model, pairs: Sequence[IdPair], evaluate: Evaluate) -> None:
        self.run, self.config, self.model, self.pairs, self.evaluate = run, config, model, pairs, evaluate
        self.batches = Batches(pairs, config.batches.tokens, config.batches.pool, config.run.seed)
        self.optimisers = make_optimisers(model, config.optimiser)
        self.progress = Progress()
        self.device = pick_device(config.run.device)
        self.model.to(self.device)
        self.autocast = use_bf16(config.run.precision, self.device)

    def resume(self) -> None:
        """Take up the run where `state.pt` left it; a run without one starts from the beginning."""
        if not (self.run / "state.pt").is_file():
            return
        saved = load_tensors(self.run / "state.pt")
        self.model.load_state_dict(saved["model"])
        for optimiser, state in zip(self.optimisers, saved["optimisers"], strict=True):
            peaks = [group["peak"] for group in optimiser.param_groups]
            optimiser.load_state_dict(state)
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["peak"] = peak  # a changed rate in the configuration holds from here on
        self.progress = Progress(**saved["progress"])
        torch.set_rng_state(saved["random"])
        if saved["random_cuda"] is not None:
            torch.cuda.set_rng_state_all(saved["random_cuda"])
        self._forget_later_log()

    def fit(self, on_step: Callable[[Tick], object] = lambda tick: None) -> Progress:
        """Run to the end: the last step of the schedule, or no better BLEU for `patience` evaluations."""
        progress, config = self.progress, self.config
        while progress.step < config.schedule.steps and not progress.finished:
            order = self.batches.epoch(progress.epoch)
            while progress.batch < len(order) and progress.step < config.schedule.steps and not progress.finished:
                batch = make_batch([self.pairs[i] for i in order[progress.batch]], self.model.sizes.special)
                value = self._step(batch)
                progress.batch += 1
                last = progress.step == config.schedule.steps
                on_step(Tick(progress.step, config.schedule.steps, value, progress.tokens, self._rate()))
                if progress.step % config.evaluation.every == 0 or last:
                    self._evaluate()
                if progress.step % config.run.save_every == 0 or last or progress.finished:
                    self.save()
            if progress.batch >= len(order):
                progress.epoch, progress.batch = progress.epoch + 1, 0
        progress.finished = True
        self.save()
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

    def _rate(self) -> float:
        return rate_factor(self.progress.step, self.config.schedule)

    def _step(self, batch: Batch) -> float:
        """One optimiser step; the batch's loss per token."""
        self.model.train()
        settings, progress = self.config.optimiser, self.progress
        set_rates(self.optimisers, self._rate())
        with torch.autocast(self.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext():
            logits = self.model(batch.source.to(self.device), batch.lengths.to(self.device), batch.target.to(self.device))
        pad = self.model.sizes.special.pad
        loss, count = losses.cross_entropy(logits, batch.labels.to(self.device), pad, settings.label_smoothing)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        value = float(loss.detach())
        if value != value:
            raise FuseqError(f"the loss is not a number at step {progress.step}; lower optimiser.rate")
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

    def _snapshot(self, step: int) -> Path:
        return self.run / "snapshots" / f"{step}.pt"

    def _take_snapshot(self) -> None:
        progress = self.progress
        save_tensors(self._snapshot(progress.step), {"weights": self.model.state_dict(), "step": progress.step})
        progress.snapshots = [*progress.snapshots, progress.step][-self.config.evaluation.average :]
        # One more than is averaged stays: a resumed run may start before the newest.
        spared = set(progress.snapshots)
        older = sorted((int(file.stem) for file in (self.run / "snapshots").glob("*.pt")), reverse=True)
        for step in [s for s in older if s not in spared][self.config.evaluation.average :]:
            self._snapshot(step).unlink()

    def _log(self, entry: dict[str, Any]) -> None:
        with (self.run / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "time": round(time.time())}) + "\n")

    def _forget_later_log(self) -> None:
        """Drop log lines of steps that will be made again."""
        lines = read_log(self.run)
        kept = [line for line in lines if line["step"] <= self.progress.step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        (self.run / "log.jsonl").write_text(text, encoding="utf-8")


def read_log(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run; a half-written last line is ignored."""
    path = run / "log.jsonl"
    entries = []
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
        raise ConfigError("run.device is cuda, but torch sees no CUDA device; use cpu, or install a CUDA build of torch")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def use_bf16(wanted: str, device: torch.device) -> bool:
    """Whether to autocast to bfloat16: asked for, or fast on the device."""
    if wanted != "auto":
        return wanted == "bf16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return bool(torch.cpu._is_avx512_bf16_supported())
