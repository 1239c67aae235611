"""Three minutes that guard the ratios: the cells of `floors.toml`, each against one peer."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from benchmarks.bars import bar
from benchmarks.contenders import Contender, require_installed
from benchmarks.models import Options, Subject, make
from benchmarks.pairing import Ratio, interleave, ratio
from benchmarks.peers import OURS, PEERS, find_peer
from benchmarks.peers.base import Setting
from benchmarks.records import Recorder
from benchmarks.tuning import best
from serving.core.errors import ConfigError, FuseqError

TABLE = Path(__file__).parent / "floors.toml"


class FloorBroken(FuseqError):
    """Somewhere fuseq is slower than it must be."""


class Floor(BaseModel):
    """One cell and the ratio it must reach."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: str
    beam: int = Field(ge=1)
    batch: int = Field(ge=1)
    peer: str
    least: float = Field(gt=0)

    def __str__(self) -> str:
        return f"{self.subject}, beam {self.beam}, batch {self.batch}, {self.peer}"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    cpus: tuple[int, ...]
    rounds: int = 15
    seconds: float = 8.0  # a cell, its sweep apart


def read_floors(path: Path = TABLE) -> list[Floor]:
    """The table.

    Raises:
        ConfigError: it is not well-formed, or names a peer that there is not.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
        floors = [Floor(**entry) for entry in entries.pop("floor", [])]
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(f"{path.name}: {' '.join(str(error).split())[:200]}") from None
    if entries or not floors:
        raise ConfigError(f"{path.name}: holds [[floor]] tables and nothing else")
    for floor in floors:
        if floor.peer not in PEERS or floor.peer == OURS:
            raise ConfigError(f"{path.name}: no peer {floor.peer!r}; there are {', '.join(PEERS)}")
    return floors


def measure(floors: Sequence[Floor], options: Options, plan: Plan, recorder: Recorder, console: Console) -> None:
    """Measure every cell, and only then complain.

    Raises:
        FloorBroken: a ratio is below its floor; names the worst.
    """
    for floor in floors:
        require_installed(floor.peer)
    subjects = {name: make(name, options) for name in dict.fromkeys(floor.subject for floor in floors)}
    found: list[tuple[Floor, Ratio]] = []
    with bar(console, "quick", len(floors)) as advance:
        for floor in floors:
            faster = ratio_of(floor, subjects[floor.subject], plan)
            found.append((floor, faster))
            recorder.add("floor-check", **floor.model_dump(), ours_faster=round(faster.value, 3),
                         low=round(faster.low, 3), high=round(faster.high, 3))  # fmt: skip
            advance(str(floor))
    require(found)


def require(found: Sequence[tuple[Floor, Ratio]]) -> None:
    """Complain where a ratio is below its floor.

    Raises:
        FloorBroken: names the worst.
    """
    broken = sorted((faster.value / floor.least, str(floor), floor, faster) for floor, faster in found)
    if broken and broken[0][0] < 1:
        _, _, floor, faster = broken[0]
        more = sum(share < 1 for share, *_ in broken) - 1
        also = f", and {more} more" if more else ""
        raise FloorBroken(f"{floor}: {faster.value:.2f} times as fast, must be {floor.least:.2f}{also}")


def ratio_of(floor: Floor, subject: Subject, plan: Plan) -> Ratio:
    """How many times faster we are in a cell, the peer at the best of its quick settings."""
    batch, search = subject.batch(floor.batch), subject.search(floor.beam)

    def attempt(setting: Setting, rounds: int, patience: float) -> float:
        with Contender(floor.peer, subject.weights, setting, plan.cpus) as contender:
            contender.load(batch)
            contender.run(search, patience)
            return statistics.median(contender.run(search, patience) for _ in range(rounds))

    settings = find_peer(floor.peer).settings(len(plan.cpus), floor.batch)
    lead = settings[0].get("quantization")  # the kinds of arithmetic that lose everywhere are left to `offline`
    chosen = best([s for s in settings if s.get("quantization") == lead], attempt, rounds=1).setting
    with (
        Contender(OURS, subject.weights, {}, plan.cpus) as ours,
        Contender(floor.peer, subject.weights, chosen, plan.cpus) as peer,
    ):
        for contender in (ours, peer):
            contender.load(batch)
        runs = {OURS: lambda: ours.run(search), floor.peer: lambda: peer.run(search)}
        times = interleave(runs, rounds=plan.rounds, seconds=plan.seconds, warm_up=2)
    return ratio(times[OURS], times[floor.peer])
