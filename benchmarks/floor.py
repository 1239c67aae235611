"""How close the decoder's step comes to what the machine can do at all.

The floor of a step is the longer of two times (the roofline of Williams, Waterman & Patterson 2009): reading once what
the step must read from memory (its weights, each row's keys and values), and doing its multiplications at the rate of
the fastest int8 matrix product. Both rates are measured on the same processors in the same run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.bars import bar
from benchmarks.contenders import Contender
from benchmarks.machine import Ceilings, measure_ceilings
from benchmarks.models import Subject
from benchmarks.peers import OURS
from benchmarks.records import Recorder
from serving.core.manifest import Bundle, open_bundle
from serving.core.state_spec import ROW, SOURCE, TIME, Role

WEIGHT_BYTES = {1: 4, 2: 1, 3: 1, 7: 8, 10: 2, 16: 2}  # ONNX data type -> bytes
LOOK_UPS = ("Gather", "GatherBlockQuantized", "GatherND", "GatherElements")
PRODUCTS = ("MatMul", "Gemm", "MatMulIntegerToFloat", "MatMulInteger")
TOP_OPERATORS = 12


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    cpus: tuple[int, ...]
    rows: tuple[int, ...] = (1, 8, 32, 128)
    rounds: int = 10


@dataclass(frozen=True, slots=True)
class Work:
    """What one step of one bundle must do."""

    weight_bytes: float  # read whatever the rows
    row_bytes: float  # keys and values of one row at the middle of its output
    row_operations: float  # of one row: two for each weight of a matrix

    def seconds(self, rows: int, ceilings: Ceilings) -> tuple[float, float]:
        """Least seconds of a step by memory and by arithmetic."""
        memory = (self.weight_bytes + rows * self.row_bytes) / (ceilings.memory_gbs * 1e9)
        return memory, rows * self.row_operations / (ceilings.int8_tops * 1e12)


def measure(subjects: Sequence[Subject], plan: Plan, recorder: Recorder, console: Console) -> None:
    """Every subject at every number of rows."""
    ceilings = measure_ceilings(plan.cpus)
    recorder.add("ceilings", **ceilings.to_json())
    with bar(console, "floor", len(subjects) * (len(plan.rows) + 1)) as advance:
        for subject in subjects:
            bundle = open_bundle(subject.weights.path("bundle"))
            work = work_of(bundle, len(subject.sources[0]), subject.forced or len(subject.sources[0]))
            for rows in plan.rows:
                recorder.add("floor", subject=subject.name, **step_of(subject, rows, work, ceilings, plan))
                advance(f"{subject.name}, {rows} rows")
            for rows in (plan.rows[0], plan.rows[-1]):
                for record in profile(subject, rows, plan):
                    recorder.add("profile", subject=subject.name, **record)
            advance(f"{subject.name}, profile")


def work_of(bundle: Bundle, source: int, target: int) -> Work:
    """What the step graph of the default precision must read and multiply.

    A table that is only looked up in is not read; a row's keys and values are those in the middle of `target` tokens.
    """
    import onnx

    path = bundle.file(bundle.graphs().graphs["step"])
    graph = onnx.load(str(path), load_external_data=False).graph
    sizes = {tensor.name: float(np.prod(tensor.dims, dtype=np.float64)) for tensor in graph.initializer}
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    read = {name for node in graph.node if node.op_type not in LOOK_UPS for name in node.input} & set(sizes)
    weights = sum(sizes[name] * WEIGHT_BYTES.get(kinds[name], 4) for name in read)
    operations = sum(_operations(node, sizes) for node in graph.node)
    return Work(weights, _row_bytes(bundle, source, target), operations)


def _operations(node: Any, sizes: dict[str, float]) -> float:
    """Operations of one row in a matrix product with a constant: two for each weight."""
    if node.op_type == "MatMulNBits":
        shape: dict[str, int] = {attribute.name: attribute.i for attribute in node.attribute}
        return 2.0 * shape["K"] * shape["N"]
    return 2 * sizes.get(node.input[1], 0.0) if node.op_type in PRODUCTS else 0.0


def _row_bytes(bundle: Bundle, source: int, target: int) -> float:
    lengths = {SOURCE: float(source), TIME: target / 2, ROW: 1.0}
    total = 0.0
    for tensor in bundle.manifest.state_spec().of(Role.MEMORY, Role.CACHE):
        sizes = [lengths[axis] if isinstance(axis, str) else float(axis) for axis in tensor.axes]
        total += float(np.prod(sizes)) * np.dtype(tensor.dtype).itemsize
    return total


def step_of(subject: Subject, rows: int, work: Work, ceilings: Ceilings, plan: Plan) -> dict[str, Any]:
    """Median seconds of a step with `rows` rows in one engine, beside its floor."""
    setting = {"rows": rows, "workers": 1, "threads": len(plan.cpus)}
    batch, search = subject.batch(rows), subject.search(1).to_json()
    with Contender(OURS, subject.weights, setting, plan.cpus) as engine:
        rounds = [engine.call("step_times", batch=batch, search=search) for _ in range(plan.rounds + 1)][1:]
    times = [seconds for found in rounds for count, seconds in found["steps"] if count == rows]
    memory, arithmetic = work.seconds(rows, ceilings)
    floor, step = max(memory, arithmetic), float(np.median(times)) if times else float("nan")
    return {
        "rows": rows,
        "step_us": round(1e6 * step, 1),
        "floor_us": round(1e6 * floor, 1),
        "bound_by": "memory" if memory > arithmetic else "arithmetic",
        "share": round(floor / step, 4),
        "weight_mb": round(work.weight_bytes / 1e6, 2),
        "row_mops": round(work.row_operations / 1e6, 2),
    }


def profile(subject: Subject, rows: int, plan: Plan) -> list[dict[str, Any]]:
    """Share of each operator in the kernels' time, by stage."""
    with tempfile.TemporaryDirectory() as folder:
        setting = {"rows": rows, "workers": 1, "threads": len(plan.cpus), "profile": folder}
        with Contender(OURS, subject.weights, setting, plan.cpus) as engine:
            found = engine.call("profile", batch=subject.batch(rows), search=subject.search(1).to_json())
    records = []
    for stage, seconds in found.items():
        total = sum(seconds.values())
        ranked = sorted(seconds.items(), key=lambda item: -item[1])[:TOP_OPERATORS]
        shares = {operator: round(spent / total, 4) for operator, spent in ranked} if total else {}
        records.append({"rows": rows, "stage": stage, "kernel_ms": round(1e3 * total, 3), "operators": shares})
    return records
