"""Opening graphs: devices, threads, and what is said when something is missing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from serving.core.errors import BundleError, MissingDependency, NotFound, Unsupported
from serving.core.manifest import Bundle
from serving.engine import sessions
from tests.serving.engine.conftest import Opened


@pytest.fixture(scope="module")
def bundle(opened: dict[str, Opened]) -> Bundle:
    return opened["attending"][0]


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def test_open_stages_says_what_it_opened(bundle: Bundle) -> None:
    stages = sessions.open_stages(bundle, "fp32", "cpu", threads=2)
    assert (stages.precision, stages.device, stages.threads) == ("fp32", "cpu", 2)
    assert stages.align is not None
    assert sessions.open_stages(bundle, device="auto").threads == 1
    assert {port.name for port in stages.encode.get_inputs()} == {"source", "lengths"}


def test_case_85_a_cuda_device_that_is_not_there_is_an_error(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(runtime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(Unsupported, match=r"no CUDA support; .*pip install 'fuseq\[gpu\]'"):
        sessions.open_stages(bundle, device="cuda")
    monkeypatch.setattr(runtime, "get_available_providers", lambda: [sessions.CUDA, sessions.CPU])
    monkeypatch.setattr(sessions, "_open", lambda path, device, threads: (CpuOnly(), 1))
    with pytest.raises(Unsupported, match="CUDA cannot be started"):
        sessions.open_stages(bundle, device="cuda")
    assert sessions.open_stages(bundle, device="auto").device == "cpu"


class CpuOnly:
    """A session that came up without CUDA."""

    def get_providers(self) -> list[str]:
        return [sessions.CPU]

    def get_inputs(self) -> list[object]:
        class Port:
            def __init__(self, name: str) -> None:
                self.name = name

        return [Port(name) for name in ("source", "lengths", "tokens", "k")]


def test_a_missing_runtime_is_one_line_with_its_remedy(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependency, match=r"pip install 'fuseq\[cpu\]', or 'fuseq\[gpu\]'") as caught:
        sessions.open_stages(bundle)
    assert "\n" not in str(caught.value)


def test_precisions_and_graphs_that_are_missing(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="int8"):
        sessions.open_stages(bundle, "int8")
    graphs = bundle.manifest.precisions["fp32"]
    lacking = graphs.model_copy(update={"graphs": {"encode": "encode.onnx"}})
    manifest = bundle.manifest.model_copy(update={"precisions": {"fp32": lacking}})
    with pytest.raises(BundleError, match="no graph for step"):
        sessions.open_stages(replace(bundle, manifest=manifest))
    swapped = graphs.model_copy(update={"graphs": {"encode": "step.onnx", "step": "encode.onnx"}})
    manifest = bundle.manifest.model_copy(update={"precisions": {"fp32": swapped}})
    with pytest.raises(BundleError, match="lacks the inputs"):
        sessions.open_stages(replace(bundle, manifest=manifest))
    for name in ("encode.onnx", "step.onnx", "align.onnx"):
        (tmp_path / name).write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"encode.onnx cannot be opened") as caught:
        sessions.open_stages(replace(bundle, path=tmp_path))
    assert "\n" not in str(caught.value)


def test_a_process_that_shares_threads_has_one_pool(bundle: Bundle) -> None:
    """In a process of its own: the runtime's pool cannot be taken back."""
    code = """
        import os, sys
        from serving.core.errors import ConfigError
        from serving.core.manifest import open_bundle
        from serving.engine import sessions

        def native():
            return len(os.listdir("/proc/self/task"))

        bundle = open_bundle(sys.argv[1])
        assert sessions.share_threads(1) == 1  # needs no pool, and binds nobody
        kept = [sessions.open_stages(bundle, device="cpu")]
        before = native()
        assert sessions.open_stages(bundle, device="cpu", threads=5).threads == 1
        assert native() == before
        assert sessions.share_threads(3) == 3
        kept.append(sessions.open_stages(bundle, device="cpu"))
        pooled = native()
        assert pooled >= before + 2
        others = [sessions.open_stages(bundle, device="cpu") for _ in range(4)]
        assert native() == pooled
        assert {stages.threads for stages in others} == {3}
        assert sessions.share_threads(3) == 3
        try:
            sessions.share_threads(2)
        except ConfigError as error:
            print(error)
    """
    done = run_python(code, str(bundle.path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "this process shares 3 threads already; 2 need a new process"


def test_serving_never_loads_torch(bundle: Bundle) -> None:
    code = """
        import sys
        from serving.core.manifest import open_bundle
        from serving.engine.engine import Engine
        from serving.engine.sessions import open_stages
        from serving.engine.translator import Translator

        bundle = open_bundle(sys.argv[1])
        with Engine(bundle, open_stages(bundle, device="cpu", threads=1)) as engine:
            (answer,) = Translator(bundle, engine).translate(["the cat"])
            assert answer.steps > 0
        loaded = {name.partition(".")[0] for name in sys.modules}
        assert not loaded & {"torch", "onnx", "training", "export", "grpc"}, loaded
    """
    done = run_python(code, str(bundle.path))
    assert done.returncode == 0, done.stderr
