"""Proof that the graphs compute what the PyTorch model computes, and that rows do not disturb each other.

Every stage runs on a grid of batch sizes and lengths, with random ids in the padding, random numbers in the unused
part of every buffer, and rows that start at different steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from export.errors import ParityError
from export.sessions import Array, Sessions
from serving.core.state_spec import SOURCE, Role, StateSpec, StateTensor
from training.models.base import Model

BATCHES, LENGTHS = (1, 2, 7), (1, 2, 6, 7, 50)
TOLERANCE = 1e-4  # on log-probabilities and weights; on states relative to the largest value, where that is over 1
STEPS = 5  # decoder positions compared in each cell of the grid
LONG = 100  # steps over which cached and uncached decoding are compared
SPARE = 3  # unused positions at the end of the buffers
Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Cell:
    """One case of the grid. Ids in the padding are random."""

    source: NDArray[np.int64]  # (batch, source)
    lengths: NDArray[np.int32]  # (batch,)
    target: NDArray[np.int64]  # (batch, target), begin symbol first

    @property
    def torch_source(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the model."""
        return torch.from_numpy(self.source), torch.from_numpy(self.lengths)


def grid(model: Model, seed: int = 0) -> Iterator[Cell]:
    """All cells, lengths cut to the model's limits."""
    sizes, random = model.sizes, np.random.default_rng(seed)
    for length in sorted({min(length, sizes.source_limit) for length in LENGTHS}):
        for batch in BATCHES:
            yield random_cell(model, random, batch, length, min(STEPS, sizes.target_limit))


def random_cell(model: Model, random: np.random.Generator, batch: int, length: int, steps: int) -> Cell:
    """Random ids; the first row is as long as the batch."""
    lengths = random.integers(1, length + 1, batch).astype(np.int32)
    lengths[0] = length
    target = random.integers(0, model.sizes.target_vocabulary, (batch, steps))
    target[:, 0] = model.sizes.special.bos
    return Cell(random.integers(0, model.sizes.source_vocabulary, (batch, length)), lengths, target)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch with one thread: with more it sums in another order, and the figures would depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
@torch.inference_mode()
def measure_parity(model: Model, sessions: Sessions, progress: Progress = lambda stage: None) -> dict[str, float]:
    """Largest difference from PyTorch over the grid, by stage.

    Raises:
        ParityError: an output is not finite.
    """
    worst = {"encode": 0.0, "step": 0.0} | ({"align": 0.0} if sessions.has("align") else {})
    for number, cell in enumerate(grid(model)):
        worst["encode"] = max(worst["encode"], _encode_difference(model, sessions, cell))
        worst["step"] = max(worst["step"], _step_difference(model, sessions, cell, np.random.default_rng(number)))
        if "align" in worst:
            worst["align"] = max(worst["align"], _align_difference(model, sessions, cell))
        progress(f"{cell.source.shape[0]} x {cell.source.shape[1]}")
    return worst


def check_parity(parity: Mapping[str, float], tolerance: float = TOLERANCE) -> None:
    """Raise where a stage differs by more than the tolerance.

    Raises:
        ParityError: it does.
    """
    for stage, difference in parity.items():
        if not difference <= tolerance:
            raise ParityError(
                f"stage {stage} differs from PyTorch by {difference:.2g}, more than {tolerance:.2g}: "
                "the export is wrong; check that the model is a pure function of its inputs and weights"
            )


def _finite(stage: str, name: str, array: Array) -> Array:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ParityError(f"stage {stage}: {name} is not finite; masked scores must stay finite")
    return array


def _encode_difference(model: Model, sessions: Sessions, cell: Cell) -> float:
    expected = model.initial(model.encode(*cell.torch_source))
    found = sessions.encode(cell.source, cell.lengths)
    worst = 0.0
    for tensor in model.state_spec().of(Role.MEMORY, Role.RECURRENT):
        array, reference = _finite("encode", tensor.name, found[tensor.name]), expected[tensor.name].numpy()
        for row, length in enumerate(cell.lengths):
            a, b = (_live(tensor, one[row], int(length)).astype(np.float64) for one in (array, reference))
            worst = max(worst, float(np.abs(a - b).max(initial=0)) / max(1.0, float(np.abs(b).max(initial=0))))
    return worst


def _live(tensor: StateTensor, row: Array, length: int) -> Array:
    """One row of a state tensor without its padding."""
    axis = tensor.axis(SOURCE)
    return row if axis is None else row.take(range(length), axis - 1)


def random_buffers(
    spec: StateSpec, state: Mapping[str, Array], lengths: Array, source: int, time: int, random: np.random.Generator
) -> dict[str, Array]:
    """The state in buffers of `source` and `time` positions; whatever no row may read is random."""
    buffers: dict[str, Array] = {}
    for tensor in spec:
        shape = tensor.shape(len(lengths), source, time)
        buffer = random.normal(size=shape).astype(tensor.dtype)
        axis = tensor.axis(SOURCE)
        if tensor.role is not Role.CACHE and axis is None:
            buffer = np.array(state[tensor.name])
        elif tensor.role is not Role.CACHE:
            assert axis is not None
            for row, length in enumerate(lengths):
                target, origin = (np.moveaxis(one[row], axis - 1, 0) for one in (buffer, state[tensor.name]))
                target[: int(length)] = origin[: int(length)]
        buffers[tensor.name] = buffer
    return buffers


class StaggeredRows:
    """Rows that decode given targets, row r beginning `starts[r]` steps late and idling at position 0 until then."""

    def __init__(self, spec: StateSpec, sessions: Sessions, buffers: dict[str, Array], starts: Array) -> None:
        self.spec, self.sessions, self.starts = spec, sessions, starts
        self.state, self.begun = dict(buffers), {t.name: buffers[t.name] for t in spec.of(Role.RECURRENT)}

    def step(self, number: int, target: Array, k: int) -> Iterator[tuple[int, int, Array, Array]]:
        """Run one step; give (row, position, tokens, scores) of each row that has begun."""
        positions = np.maximum(number - self.starts, 0).astype(np.int32)
        positions = np.minimum(positions, target.shape[1] - 1)
        rows = np.arange(len(positions))
        tokens, scores, replaced = self.sessions.step(target[rows, positions], positions, k, self.state)
        for name, array in replaced.items():
            if name in self.begun:  # an idle row begins anew
                idle = (number < self.starts).reshape(-1, *(1,) * (array.ndim - 1))
                array = np.where(idle, self.begun[name], array)
            self.state[name] = _finite("step", name, array) if name in self.begun else array
        for row in rows:
            if 0 <= number - self.starts[row] < target.shape[1]:
                yield int(row), int(positions[row]), tokens[row], _finite("step", "top_scores", scores[row])


def _step_difference(model: Model, sessions: Sessions, cell: Cell, random: np.random.Generator) -> float:
    expected = model(*cell.torch_source, torch.from_numpy(cell.target)).float().log_softmax(-1).numpy()
    rows, source = cell.source.shape
    spec, positions = model.state_spec(), cell.target.shape[1]
    state = {name: tensor.numpy() for name, tensor in model.initial(model.encode(*cell.torch_source)).items()}
    buffers = random_buffers(spec, state, cell.lengths, source + SPARE, positions + SPARE, random)
    decoder = StaggeredRows(spec, sessions, buffers, np.asarray(random.integers(0, 3, rows)))
    k = min(8, model.sizes.target_vocabulary)
    worst = 0.0
    for number in range(positions + 2):
        for row, position, tokens, scores in decoder.step(number, cell.target, k):
            reference = expected[row, position]
            best = np.sort(reference)[::-1][:k]
            worst = max(worst, float(np.abs(scores - reference[tokens]).max()), float(np.abs(scores - best).max()))
    return worst


def _align_difference(model: Model, sessions: Sessions, cell: Cell) -> float:
    expected = model.align(*cell.torch_source, torch.from_numpy(cell.target)).numpy()
    feeds: dict[str, Array] = {"source": cell.source, "lengths": cell.lengths, "target": cell.target}
    found = _finite("align", "alignment", sessions.run("align", feeds)["alignment"])
    return float(np.abs(found - expected).max())


@torch.inference_mode()
def check_cached_decoding(model: Model, sessions: Sessions, steps: int = LONG, seed: int = 1) -> int:
    """Decode step by step, then all at once from the same tokens: the same candidates must come in the same order.

    Each row follows now its best, now its second best candidate and so on, so that outputs vary.

    Returns:
        Steps compared.

    Raises:
        ParityError: the cached step and the teacher-forced model disagree.
    """
    steps = min(steps, model.sizes.target_limit)
    random = np.random.default_rng(seed)
    cell = random_cell(model, random, 3, min(9, model.sizes.source_limit), 1)
    spec, k = model.state_spec(), min(4, model.sizes.target_vocabulary)
    state = random_buffers(spec, sessions.encode(cell.source, cell.lengths), cell.lengths, 12, steps, random)
    fed: list[Array] = [cell.target[:, 0]]
    chosen: list[tuple[Array, Array]] = []
    for position in range(steps):
        tokens, scores, replaced = sessions.step(fed[-1], np.full(3, position, np.int32), k, state)
        state |= replaced
        chosen.append((tokens, scores))
        fed.append(tokens[:, random.integers(0, k)])
    expected = model(*cell.torch_source, torch.from_numpy(np.stack(fed[:-1], 1))).float().log_softmax(-1).numpy()
    for position, (tokens, scores) in enumerate(chosen):
        uncached = expected[:, position]  # (row, vocabulary)
        best = np.sort(uncached, -1)[:, ::-1][:, :k]
        # Both the tokens' own values and the order: only candidates closer than the tolerance may change places.
        difference = max(
            float(np.abs(scores - np.take_along_axis(uncached, tokens, -1)).max()), float(np.abs(scores - best).max())
        )
        if not difference <= TOLERANCE:
            raise ParityError(f"cached decoding leaves uncached decoding at step {position}, by {difference:.2g}")
    return steps


def check_independence(model: Model, sessions: Sessions, tolerance: float, seed: int = 2) -> float:
    """Rows alone against the same rows among others of other lengths, joining at other steps (cases 40, 57).

    Returns:
        The largest difference of a log-probability.

    Raises:
        ParityError: a token differs, or a score by more than the tolerance.
    """
    random = np.random.default_rng(seed)
    sizes, spec = model.sizes, model.state_spec()
    steps = min(12, sizes.target_limit)
    together = random_cell(model, random, 6, min(20, sizes.source_limit), steps)
    starts = random.integers(0, 4, 6)

    def decode(rows: list[int], starts: Array) -> dict[tuple[int, int], tuple[Array, Array]]:
        lengths = together.lengths[rows]
        source = together.source[rows][:, : lengths.max()]
        encoded = sessions.encode(source, lengths)
        buffers = random_buffers(spec, encoded, lengths, int(lengths.max()) + SPARE, steps, np.random.default_rng(0))
        decoder = StaggeredRows(spec, sessions, buffers, starts)
        k = min(4, sizes.target_vocabulary)
        return {
            (rows[row], position): (tokens, scores)
            for number in range(steps + 4)
            for row, position, tokens, scores in decoder.step(number, together.target[rows], k)
        }

    batched, worst = decode(list(range(6)), starts), 0.0
    for row in range(6):
        for place, (tokens, scores) in decode([row], np.zeros(1, np.int64)).items():
            other_tokens, other_scores = batched[place]
            difference = float(np.abs(scores - other_scores).max())
            worst = max(worst, difference)
            if difference > tolerance or (tokens[0] != other_tokens[0] and scores[0] - scores[1] > tolerance):
                raise ParityError(f"a row's scores depend on its neighbours: they moved by {difference:.2g}")
    return worst


def check_levels(folder: Path, files: Mapping[str, str], model: Model, seed: int = 3) -> float:
    """The graphs as the runtime optimises them and as they are: the same results (case 90).

    Raises:
        ParityError: they differ.
    """
    levels = onnxruntime.GraphOptimizationLevel
    plain, optimised = (Sessions(folder, files, level) for level in (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_ALL))
    random = np.random.default_rng(seed)
    cell = random_cell(model, random, 2, min(6, model.sizes.source_limit), min(STEPS, model.sizes.target_limit))
    spec = model.state_spec()
    state = plain.encode(cell.source, cell.lengths)
    buffers = random_buffers(spec, state, cell.lengths, cell.source.shape[1], 4, random)
    fed: dict[str, Array] = {
        "tokens": cell.target[:, 0],
        "positions": np.zeros(2, np.int32),
        "k": np.array([2]),
        **buffers,
    }
    feeds: dict[str, dict[str, Array]] = {"encode": {"source": cell.source, "lengths": cell.lengths}, "step": fed}
    feeds["align"] = {**feeds["encode"], "target": cell.target}
    worst = 0.0
    for stage in files:
        one, other = plain.run(stage, feeds[stage]), optimised.run(stage, feeds[stage])
        for name in one:
            if name.removeprefix("next.") in buffers and one[name].ndim > 2:
                continue  # buffers hold random numbers outside of what was written
            worst = max(worst, float(np.abs(one[name].astype(np.float64) - other[name]).max()))
    if not worst <= TOLERANCE:
        raise ParityError(f"the runtime's own optimisations change results by {worst:.2g}")
    return worst
