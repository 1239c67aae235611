"""The machine that is measured on: what it is, who else is using it, and how fast it can be at all."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.core.errors import ConfigError, FuseqError

FEATURES = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8", "avx512_bf16", "asimddp", "i8mm")
MOST_FOREIGN_LOAD = 0.05  # of the processors measured on; more makes times meaningless
SIZE = 1024  # of the square matrices that measure arithmetic
READ_BYTES = 512 << 20  # far beyond any cache


class MachineBusy(FuseqError):
    """Somebody else uses the processors."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a figure must say of the machine that it was measured on."""

    processor: str
    features: tuple[str, ...]  # that decide the speed of low-precision arithmetic (int8 saturation among it)
    cpus: tuple[int, ...]  # measured on
    memory_gib: float
    system: str


@dataclass(frozen=True, slots=True)
class Ceilings:
    """How fast the machine is at most, on the processors measured on."""

    memory_gbs: float  # GB/s read
    int8_tops: float  # TOP/s of the runtime's fastest int8 matrix product
    fp32_tops: float

    def to_json(self) -> dict[str, float]:
        """For a record."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def parse_cpus(text: str) -> tuple[int, ...]:
    """ "0,2-3" as (0, 2, 3); all that the process may use for "".

    Raises:
        ConfigError: not such a list, or processors that the process may not use.
    """
    usable = os.sched_getaffinity(0)
    if not text:
        return tuple(sorted(usable))
    chosen: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            chosen.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ConfigError(f"--cpus {text}: must be like 0,1 or 0-3") from None
    if not chosen or not chosen <= usable:
        raise ConfigError(f"--cpus {text}: this process may use {', '.join(map(str, sorted(usable)))}")
    return tuple(sorted(chosen))


def pin(cpus: Sequence[int]) -> None:
    """Keep this process, and those it starts from now on, on `cpus`."""
    os.sched_setaffinity(0, cpus)


def describe(cpus: Sequence[int]) -> Machine:
    """This machine."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info.splitlines())}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = (
        f"{fields.get('model name', platform.machine())}, family {fields.get('cpu family', '?')} "
        f"model {fields.get('model', '?')}"
    )
    return Machine(name, tuple(f for f in FEATURES if f in flags), tuple(cpus), round(memory, 1), platform.release())


def _busy_seconds(cpus: Sequence[int]) -> float:
    """Seconds that `cpus` have worked since the machine started, for whomever."""
    wanted = {f"cpu{number}" for number in cpus}
    total = 0
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        name, *ticks = line.split()
        if name in wanted:
            values = [int(tick) for tick in ticks]
            total += sum(values[:3]) + sum(values[5:8])  # user, nice, system; interrupts and time stolen from us
    return total / os.sysconf("SC_CLK_TCK")


def foreign_load(cpus: Sequence[int], seconds: float = 2.0) -> float:
    """Share of `cpus` that others take while this process sleeps, 0 to 1."""
    before, own = _busy_seconds(cpus), time.process_time()
    begin = time.monotonic()
    time.sleep(seconds)
    spent = time.monotonic() - begin
    return max(0.0, (_busy_seconds(cpus) - before - (time.process_time() - own)) / (spent * len(cpus)))


def require_idle(cpus: Sequence[int], *, force: bool, warn: Callable[[str], None], seconds: float = 2.0) -> float:
    """Refuse to measure beside others, or only warn where `force` is set; returns the load found.

    Raises:
        MachineBusy: others use more than a twentieth of the processors.
    """
    load = foreign_load(cpus, seconds)
    if load > MOST_FOREIGN_LOAD:
        message = f"others use {load:.0%} of processors {','.join(map(str, cpus))}: times would mean nothing"
        if not force:
            raise MachineBusy(f"{message}; wait for them, choose others by --cpus, or give --force")
        warn(message)
    return load


def measure_ceilings(cpus: Sequence[int], repeats: int = 5) -> Ceilings:
    """Measure memory and arithmetic with all of `cpus` at work; the best of `repeats` counts."""
    threads = len(cpus)
    int8 = max(_product_rate(kind, threads, repeats) for kind in ("MatMulInteger", "MatMulNBits"))
    return Ceilings(_memory_rate(threads, repeats), int8, _product_rate("MatMul", threads, repeats))


def _memory_rate(threads: int, repeats: int) -> float:
    """GB/s that `threads` threads read together: dot products of vectors that no cache holds."""
    import numpy as np

    parts = [np.ones(READ_BYTES // threads // 4, np.float32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            barrier = threading.Barrier(threads)

            def read(part: Any, barrier: threading.Barrier = barrier) -> tuple[float, float]:
                barrier.wait()
                begin = time.perf_counter()
                part.max()  # vectorised, and nothing is written
                return begin, time.perf_counter()

            spans = list(pool.map(read, parts))
            spent = max(end for _, end in spans) - min(begin for begin, _ in spans)
            best = max(best, sum(part.nbytes for part in parts) / spent / 1e9)
    return best


def _product_rate(kind: str, threads: int, repeats: int) -> float:
    """TOP/s of one matrix product of the runtime (2 operations for each multiplication and addition)."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(_product_model(kind), options, providers=["CPUExecutionProvider"])
    feed = {"a": np.ones((SIZE, SIZE), np.uint8 if kind == "MatMulInteger" else np.float32)}
    session.run(None, feed)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        session.run(None, feed)
        times.append(time.perf_counter() - begin)
    return 2 * SIZE**3 / min(times) / 1e12


def _product_model(kind: str) -> bytes:
    """A graph of one matrix product with a constant right side."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    inputs, domain = ["a", "b"], ""
    attributes: dict[str, Any] = {}
    left = result = TensorProto.FLOAT
    if kind == "MatMulNBits":
        block, domain = 64, "com.microsoft"
        attributes = {"K": SIZE, "N": SIZE, "bits": 8, "block_size": block, "accuracy_level": 4}
        codes = random.integers(0, 256, (SIZE, SIZE // block, block), np.uint8)
        weights = {"b": codes, "scales": np.full((SIZE, SIZE // block), 0.01, np.float32)}
        inputs.append("scales")
    elif kind == "MatMulInteger":
        left, result = TensorProto.UINT8, TensorProto.INT32
        weights = {"b": random.integers(-64, 64, (SIZE, SIZE), np.int8)}
    else:
        weights = {"b": random.standard_normal((SIZE, SIZE), np.float32)}
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, ["c"], domain=domain, **attributes)],
        kind,
        [helper.make_tensor_value_info("a", left, ["m", SIZE])],
        [helper.make_tensor_value_info("c", result, ["m", SIZE])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())
