"""Pictures of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from training.checkpoint import write_atomically


def plot_run(entries: list[dict[str, Any]], path: Path, title: str) -> None:
    """Loss and scores of the evaluations over steps, as one PNG."""
    steps = [entry["step"] for entry in entries]
    figure = Figure(figsize=(10, 4), layout="constrained")  # no pyplot: it keeps figures, and state of its own
    left, right = figure.subplots(1, 2)
    left.plot(steps, [entry["train_loss"] for entry in entries], marker=".", label="training (smoothed labels)")
    left.plot(steps, [entry["dev_loss"] for entry in entries], marker=".", label="development")
    left.set(xlabel="step", ylabel="loss (nats per token)", title="Loss")
    right.plot(steps, [entry["bleu"] for entry in entries], marker=".", color="tab:green", label="BLEU")
    right.plot(steps, [entry["chrf"] for entry in entries], marker=".", color="tab:olive", label="chrF")
    right.set(xlabel="step", ylabel="score", title="Development set")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(title, parse_math=False)
    write_atomically(path, lambda file: figure.savefig(file, dpi=110, format="png"))
