"""Stages opened and run as plainly as possible: for checks and reference decoding, not for serving."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

Array = NDArray[Any]

# The graphs are fused already. At higher levels the runtime joins Add and LayerNormalization into one slower operator.
LEVEL = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC


class Sessions:
    """One precision's stages from a folder."""

    def __init__(self, folder: Path, files: Mapping[str, str], level: object = LEVEL, threads: int = 1) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self._sessions = {
            stage: onnxruntime.InferenceSession(str(folder / file), options, providers=["CPUExecutionProvider"])
            for stage, file in files.items()
        }
        self._outputs = {stage: [o.name for o in session.get_outputs()] for stage, session in self._sessions.items()}

    def has(self, stage: str) -> bool:
        """Whether the stage is there."""
        return stage in self._sessions

    def run(self, stage: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run a stage: outputs by name."""
        names = self._outputs[stage]
        return dict(zip(names, self._sessions[stage].run(names, dict(feeds)), strict=True))

    def encode(self, source: Array, lengths: Array) -> dict[str, Array]:
        """The state before the first step."""
        return self.run("encode", {"source": source, "lengths": lengths})

    def step(
        self, tokens: Array, positions: Array, k: int, state: Mapping[str, Array]
    ) -> tuple[Array, Array, dict[str, Array]]:
        """One step: the k likeliest tokens of each row, their log-probabilities, and the replaced state."""
        fed = {"tokens": tokens, "positions": positions, "k": np.array([k], np.int64), **state}
        found = self.run("step", fed)
        replaced = {name.removeprefix("next."): array for name, array in found.items() if name.startswith("next.")}
        return found["top_tokens"], found["top_scores"], replaced
