"""What overhead and floor are computed from."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.floor import Work, work_of
from benchmarks.machine import Ceilings
from benchmarks.servers.instrumented import LOOP, NATIVE, PARTS, Clock, instrument
from benchmarks.weights import recover
from serving import registry
from serving.core.manifest import open_bundle

FROZEN = Path(__file__).parents[1] / "data" / "frozen-v1"


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_time_in_a_wrapped_callee_is_the_callees() -> None:
    clock = Clock()
    inner = clock.wrap("inner", lambda: spin(0.03))

    def body() -> None:
        spin(0.01)
        inner()

    before = clock.snapshot()
    clock.wrap("outer", body)()
    after = clock.snapshot()
    assert after["inner"] == pytest.approx(0.03, abs=0.01)
    assert after["outer"] == pytest.approx(0.01, abs=0.01)
    assert after[LOOP] - before[LOOP] < 0.03  # only what was not wrapped is left to the thread


def test_parts_add_up_to_the_process() -> None:
    clock = Clock()
    work = clock.wrap("work", spin)
    other = threading.Thread(target=work, args=(0.05,))
    other.start()
    work(0.05)
    total = time.process_time()
    found = clock.snapshot()
    other.join()
    # The kernel's account of threads that have ended is lost to us; they count as native ones.
    assert sum(found.values()) == pytest.approx(total, rel=0.2)
    assert found["work"] >= 0.05
    assert found[NATIVE] >= 0


def test_every_part_is_where_it_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that was renamed in the engine would silently count for its loop."""
    monkeypatch.setattr(registry, "open_stages", registry.open_stages)  # put back afterwards
    done: list[str] = []

    class Noting(Clock):
        def wrap(self, part: str, function: object) -> object:
            done.append(part)
            return function

    assert instrument(Noting()) == []
    assert set(done) == set(PARTS)


def test_work_of_a_step_is_its_decoders_weights() -> None:
    bundle = open_bundle(FROZEN)
    weights = recover(bundle, "fp32")
    layers = {
        name: weight
        for name, weight in weights.items()
        if name.startswith("decoder.") and weight.ndim == 2 and ".cross.packed." not in name
    }
    expected = 2 * (sum(weight.size for weight in layers.values()) + weights["projection.weight"].size)
    work = work_of(bundle, source=10, target=8)
    assert work.row_operations == expected
    config = bundle.manifest.architecture_config
    keys = 2 * config["decoder_layers"] * config["size"] * 4  # bytes of keys and values at one position
    assert work.row_bytes == keys * (10 + 4) + 4  # and the length of the source
    assert expected / 2 <= work.weight_bytes < 4 * expected / 2  # int8: a byte a weight; scales and norms beside


def test_the_longer_of_two_times_is_the_floor() -> None:
    ceilings = Ceilings(memory_gbs=10.0, int8_tops=1.0, fp32_tops=0.1)
    work = Work(weight_bytes=10e6, row_bytes=1e3, row_operations=20e6)
    memory, arithmetic = work.seconds(1, ceilings)
    assert memory == pytest.approx(1.0001e-3)
    assert arithmetic == pytest.approx(2e-5)
    memory, arithmetic = work.seconds(128, ceilings)
    assert memory < arithmetic
    assert np.isclose(arithmetic, 128 * 2e-5)
