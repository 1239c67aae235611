"""The graphs of a bundle as sessions of ONNX Runtime, and the threads that they run on.

Threads. A session runs in the thread that calls it, helped by a pool of `threads - 1` native threads. A server
calls `share_threads` before it opens anything, and all its sessions then use one pool for the whole process; that
pool cannot be replaced, and every other session of the process must use it too. Without it each session has its
own pool, which spins only while the session runs; the sessions of one engine run one at a time, so no two pools
compete. The shared pool spins for some 50 ms after each run (the runtime offers no switch): nothing when idle.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from serving.core.errors import BundleError, ConfigError, MissingDependency, Unsupported
from serving.core.manifest import Bundle

Device = Literal["auto", "cpu", "cuda"]

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
FATAL = 4  # a failing call raises, and says why; the runtime need not print it as well


class Port(Protocol):
    """One input or output of a graph."""

    name: str
    shape: list[int | str | None]


class Graph(Protocol):
    """What is used of an onnxruntime.InferenceSession."""

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> list[Any]: ...
    def io_binding(self) -> Any: ...
    def run_with_iobinding(self, iobinding: Any) -> None: ...
    def get_inputs(self) -> Sequence[Port]: ...
    def get_outputs(self) -> Sequence[Port]: ...


@dataclass(frozen=True, slots=True)
class Stages:
    """The open graphs of one precision of a bundle."""

    encode: Graph
    step: Graph
    align: Graph | None
    precision: str
    device: Literal["cpu", "cuda"]  # the one that was found
    threads: int

    def __post_init__(self) -> None:
        for graph, needed in ((self.encode, {"source", "lengths"}), (self.step, {"tokens", "k"})):
            if missing := needed - {port.name for port in graph.get_inputs()}:
                raise BundleError(f"a graph of the bundle lacks the inputs {sorted(missing)}; export it again")


_share_lock = threading.Lock()
_shared_threads = 0  # that all sessions share; 0 while each has its own
_pool_made = False  # one thread needs no pool


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependency(
            "ONNX Runtime is not installed; run: pip install 'fuseq[cpu]', or 'fuseq[gpu]' for a CUDA device"
        ) from error
    return onnxruntime


def share_threads(threads: int) -> int:
    """Let every session that this process opens from now on share `threads` threads; returns their number.

    For more than one thread this makes the process-wide pool of ONNX Runtime, which refuses sessions that do not use
    it: whoever opens sessions in this process must take `session_options`.

    Raises:
        ConfigError: there is a pool of another size already; it cannot be replaced.
    """
    global _shared_threads, _pool_made
    with _share_lock:
        if _pool_made and threads != _shared_threads:
            raise ConfigError(f"this process shares {_shared_threads} threads already; {threads} need a new process")
        if threads > 1 and not _pool_made:
            _runtime().set_global_thread_pool_sizes(threads, 1)
            _pool_made = True
        _shared_threads = threads
    return threads


def session_options(threads: int = 1) -> tuple[Any, int]:
    """Options for a session of this process, and the number of threads that it will use."""
    options = _runtime().SessionOptions()
    options.log_severity_level = FATAL
    # A bundle's graphs are fused, and were proved at this level. The levels above change nothing for the better, and
    # join Add and LayerNormalization into one operator that is slower.
    options.graph_optimization_level = _runtime().GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.enable_mem_pattern = False  # it keeps a plan for every shape ever seen, and shapes vary all the time
    options.inter_op_num_threads = 1
    with _share_lock:
        shared, pool_made = _shared_threads, _pool_made
    if pool_made:
        options.use_per_session_threads = False
        return options, shared
    own = shared or threads
    options.intra_op_num_threads = own
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options, own


def _choose_device(device: Device) -> Literal["cpu", "cuda"]:
    has_cuda = CUDA in _runtime().get_available_providers()
    if device == "cuda" and not has_cuda:
        raise Unsupported(
            "device cuda was asked for, but the installed ONNX Runtime has no CUDA support; "
            "run: pip uninstall onnxruntime, then pip install 'fuseq[gpu]'"
        )
    return "cuda" if has_cuda and device != "cpu" else "cpu"


def _open(path: str, device: Literal["cpu", "cuda"], threads: int) -> tuple[Any, int]:
    options, used = session_options(threads)
    providers = [CUDA, CPU] if device == "cuda" else [CPU]
    try:
        session = _runtime().InferenceSession(path, options, providers=providers)
    except Exception as error:  # the runtime's own exceptions share no base class below this
        raise BundleError(f"the graph {path} cannot be opened: {' '.join(str(error).split())}") from error
    return session, used


def open_stages(bundle: Bundle, precision: str | None = None, device: Device = "auto", threads: int = 1) -> Stages:
    """Open a precision's graphs, the bundle's default for None.

    Args:
        device: `auto` takes a CUDA device where one works, else the CPU.
        threads: for each session; ignored where the process shares threads.

    Raises:
        MissingDependency: ONNX Runtime is not installed.
        NotFound: the bundle does not hold that precision.
        Unsupported: device `cuda` was asked for and cannot be used.
        BundleError: a graph is missing or cannot be opened.
    """
    graphs = bundle.graphs(precision).graphs
    if missing := {"encode", "step"} - set(graphs):
        raise BundleError(f"bundle {bundle.manifest.name!r} has no graph for {', '.join(sorted(missing))}")
    chosen = _choose_device(device)
    opened: dict[str, Any] = {}
    used = 1
    for stage in ("encode", "step", "align"):
        if stage not in graphs:
            continue
        path = str(bundle.file(graphs[stage]))
        session, used = _open(path, chosen, threads)
        if chosen == "cuda" and session.get_providers()[0] != CUDA:
            if device == "cuda":
                raise Unsupported("device cuda was asked for, but CUDA cannot be started; check the driver and cuDNN")
            chosen = "cpu"
            session, used = _open(path, chosen, threads)
        opened[stage] = session
    name = precision or bundle.manifest.default_precision
    return Stages(opened["encode"], opened["step"], opened.get("align"), name, chosen, used)
