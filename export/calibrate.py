"""What values flow into each linear layer: the ranges that int8 activations are cut to.

The fp32 graphs decode a few sentences one by one, greedily, while the inputs of their linear layers are watched. A
range belongs to a weight, not to a node: the same layer in another stage (a decoder layer in `step` and in `align`)
reads values of the same kind.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.decoding import decode
from export.graphs import Stage
from export.nodes import constant
from export.sessions import Array, Sessions
from serving.core.state_spec import StateSpec
from serving.core.types import SearchOptions
from training.models.base import Sizes

WATCHED = ("encode", "step")  # every weight of `align` is also in one of them
SENTENCES = 128
STEPS = 60  # decoded at most a sentence
KEPT = 128  # values kept of an input in one call
CODES = 255  # steps between the smallest and the largest code
SHARES = [1 - step / 40 for step in range(37)]  # of an extreme, that are tried as the end of a range


@dataclass(frozen=True, slots=True)
class Range:
    """Activations are cut to `low` .. `high` (low <= 0 <= high) and rounded to 256 codes: x ~ (code - zero) * scale."""

    low: float
    high: float

    @property
    def scale(self) -> float:
        """Width of a code."""
        return max(self.high - self.low, 1e-9) / CODES

    @property
    def zero(self) -> int:
        """The code of 0, which is met exactly."""
        return round(-self.low / self.scale)

    def rounded(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """What is left of values."""
        codes = np.clip(np.rint(values / np.float32(self.scale)) + np.float32(self.zero), 0, CODES)
        left: NDArray[np.float32] = (codes - np.float32(self.zero)) * np.float32(self.scale)
        return left


Ranges = Mapping[str, Range]  # by key of the weight


def key(weight: NDArray[np.generic]) -> str:
    """What a weight (inputs, outputs) is known by in every stage."""
    return hashlib.sha256(np.ascontiguousarray(weight).tobytes()).hexdigest()


def linear_weight(node: ir.Node) -> NDArray[np.float32] | None:
    """The weight (inputs, outputs) of a linear layer; None for every other node."""
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = constant(node.inputs[1])
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32:
        return None  # a product of two activations
    turned = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
    return np.asarray(weight.T if turned else weight, np.float32)


def calibrate(
    stages: Mapping[str, Stage],
    folder: Path,
    spec: StateSpec,
    sizes: Sizes,
    sources: Sequence[Sequence[int]],
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Range]:
    """Ranges of the inputs of every linear layer of `encode` and `step`.

    Args:
        stages: the fp32 graphs, saved in `folder` with their weights.
        sources: ids, end symbol included; some random ones are as good as any where the weights are random.
        progress: called with the number of sources just done.
    """
    layers = {name: dict(_layers(stages[name])) for name in WATCHED}  # stage -> value -> keys of the weights it meets
    seen: dict[str, _Seen] = defaultdict(_Seen)  # by key of the weight

    def watch(stage: str, arrays: Mapping[str, Array]) -> None:
        for value, keys in layers[stage].items():
            for one in keys:
                seen[one].add(arrays[value])

    with _watched(stages, folder, layers) as files:
        plain = {name: [str(value.name) for value in stages[name].graph.outputs] for name in files}
        sessions = _Watching(folder, files, plain, watch)
        options = SearchOptions(beam=1, max_length_margin=STEPS, max_length_ratio=0.0)
        for source in sources:  # one by one, so that no padding is seen
            decode(sessions, spec, sizes.special, sizes.target_limit, [source], options)
            progress(1)
    return {one: best_range(found.low, found.high, np.concatenate(found.values)) for one, found in seen.items()}


def random_sources(sizes: Sizes, count: int = SENTENCES) -> list[list[int]]:
    """Sources of random ids, for models without a development set."""
    random = np.random.default_rng(0)
    longest = max(1, min(24, sizes.source_limit - 1))
    first = min(4, sizes.source_vocabulary - 1)  # control symbols come first
    lengths = random.integers(1, longest + 1, count)
    return [[*random.integers(first, sizes.source_vocabulary, n).tolist(), sizes.special.eos] for n in lengths]


def best_range(low: float, high: float, values: NDArray[np.float32]) -> Range:
    """The part of the full range with the least squared error over some values, the upper end chosen first.

    Cutting rare outliers off makes the codes of all others finer.
    """

    def best(candidates: list[Range]) -> Range:
        errors = [float(np.square(candidate.rounded(values) - values).mean()) for candidate in candidates]
        return candidates[int(np.argmin(errors))]

    high = best([Range(low, high * share) for share in SHARES]).high
    return best([Range(low * share, high) for share in SHARES])


class _Seen:
    """What was seen of one input."""

    def __init__(self) -> None:
        self.low, self.high = 0.0, 0.0
        self.values: list[NDArray[np.float32]] = []
        self._random = np.random.default_rng(0)

    def add(self, array: Array) -> None:
        """Note the extremes, and some of the values between them."""
        flat = np.asarray(array, np.float32).ravel()
        self.low, self.high = min(self.low, float(flat.min())), max(self.high, float(flat.max()))
        self.values.append(flat[self._random.integers(0, flat.size, min(KEPT, flat.size))])


def _layers(stage: Stage) -> Iterator[tuple[str, list[str]]]:
    """Each value that linear layers of the main graph read, and the keys of their weights."""
    found: dict[str, list[str]] = {}
    for node in stage.graph:
        weight = linear_weight(node)
        if weight is not None and node.inputs[0] is not None:
            found.setdefault(str(node.inputs[0].name), []).append(key(weight))
    yield from found.items()


@contextlib.contextmanager
def _watched(
    stages: Mapping[str, Stage], folder: Path, layers: Mapping[str, Mapping[str, object]]
) -> Iterator[dict[str, str]]:
    """Copies of the graphs, beside the weights, that also give out the values to be watched; stage -> file."""
    files = {name: f"{name}.watched.onnx" for name in layers}
    try:
        for name, file in files.items():
            graph = stages[name].graph
            inputs = {value.name for value in graph.inputs}
            values = {value.name: value for node in graph for value in node.outputs}
            before = list(graph.outputs)
            have = {value.name for value in before}
            graph.outputs.extend(values[one] for one in layers[name] if one not in have and one not in inputs)
            (folder / file).write_bytes(ir.to_proto(stages[name].model).SerializeToString())
            graph.outputs[:] = before
        yield files
    finally:
        for file in files.values():
            (folder / file).unlink(missing_ok=True)


class _Watching(Sessions):
    """Sessions of watched graphs that show what goes in and comes out of them, and answer as the plain ones would."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, str],
        outputs: Mapping[str, Collection[str]],
        watch: Callable[[str, Mapping[str, Array]], None],
    ) -> None:
        super().__init__(folder, files)
        self._plain, self._watch = outputs, watch

    def run(self, stage: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
        found = super().run(stage, feeds)
        self._watch(stage, {**feeds, **found})
        return {name: found[name] for name in self._plain[stage]}
