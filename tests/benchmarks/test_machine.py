"""What is said of the machine, and when it is refused."""

from __future__ import annotations

import os
import threading
import time

import pytest

from benchmarks import machine
from benchmarks.machine import MachineBusy, describe, foreign_load, measure_ceilings, parse_cpus, require_idle
from serving.core.errors import ConfigError

USABLE = tuple(sorted(os.sched_getaffinity(0)))


def test_lists_of_processors() -> None:
    first, last = USABLE[0], USABLE[-1]
    assert parse_cpus("") == USABLE
    assert parse_cpus(f"{first}") == (first,)
    assert parse_cpus(f"{last},{first},{first}") == tuple(sorted({first, last}))
    if tuple(range(first, last + 1)) == USABLE:
        assert parse_cpus(f"{first}-{last}") == USABLE


@pytest.mark.parametrize("text", ["x", "0,", "3-1", "99999"])
def test_wrong_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--cpus"):
        parse_cpus(text)


def test_the_machine_is_described() -> None:
    found = describe((0,))
    assert found.processor
    assert found.memory_gib > 0
    assert found.cpus == (0,)


def test_own_work_is_not_a_foreign_load() -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(range(1000))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        begin, own = time.monotonic(), time.process_time()
        load = foreign_load(USABLE, 0.3)
        share = (time.process_time() - own) / (time.monotonic() - begin) / len(USABLE)
    finally:
        stop.set()
        worker.join()
    # Others may be at work here, too; together they can take no more than what this process left.
    assert 0 <= load <= 1 - share + 0.15


def test_a_busy_machine_is_refused_or_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(machine, "foreign_load", lambda cpus, seconds: 0.4)
    with pytest.raises(MachineBusy, match=r"40% of processors 0,1.*--force"):
        require_idle((0, 1), force=False, warn=said.append)
    assert require_idle((0, 1), force=True, warn=said.append) == 0.4
    assert len(said) == 1
    monkeypatch.setattr(machine, "foreign_load", lambda cpus, seconds: 0.01)
    assert require_idle((0, 1), force=False, warn=said.append) == 0.01
    assert len(said) == 1


def test_ceilings_are_rates_of_real_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx")
    monkeypatch.setattr(machine, "READ_BYTES", 64 << 20)
    monkeypatch.setattr(machine, "SIZE", 256)
    found = measure_ceilings(USABLE[:1], repeats=1)
    assert 0.05 < found.memory_gbs < 5000
    assert 1e-4 < found.fp32_tops < 100
    assert 1e-4 < found.int8_tops < 1000
    assert set(found.to_json()) == {"memory_gbs", "int8_tops", "fp32_tops"}
