"""Who may import whom: nothing runs back up, and the server never loads what only training needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("training", "export", "serving", "fuseq")
ONNX = ("onnx", "onnxruntime", "onnxscript", "onnx_ir")
GRPC = ("grpc", "grpc_health", "google.protobuf")
TRAINING_ONLY = ("torch", "onnx", "onnxscript", "sacrebleu", "safetensors", "matplotlib", "yaml")
NOBODYS = ("transformers",)  # what it computes is compared with, in tests and benchmarks


class Rule(NamedTuple):
    """What the modules under a folder may import of our packages, and what they must not import of others."""

    folder: str
    allowed: tuple[str, ...]
    forbidden: tuple[str, ...]


# The longest folder that holds a file decides.
RULES = (
    Rule("training", ("training", "serving.core"), (*GRPC, *NOBODYS, "onnxruntime")),
    Rule("export", ("export", "training", "serving.core", "serving.engine"), (*GRPC, *NOBODYS)),
    Rule("serving", ("serving", "fuseq"), (*TRAINING_ONLY, *NOBODYS)),
    Rule("serving/core", ("serving.core",), (*TRAINING_ONLY, *GRPC, *ONNX)),
    Rule("serving/engine", ("serving.core", "serving.engine"), (*TRAINING_ONLY, *GRPC)),
    Rule("serving/rpc", ("serving", "fuseq.v1"), (*TRAINING_ONLY, *ONNX)),
    Rule("fuseq", ("fuseq", "serving.core"), (*TRAINING_ONLY, *ONNX)),
)


class Import(NamedTuple):
    """One import: the module, the line, and whether it runs only when a function is called or types are checked."""

    module: str
    line: int
    lazy: bool


def imports_of(tree: ast.AST, lazy: bool = False) -> Iterator[Import]:
    """Every import under a node."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide who imports whom"
            assert node.module is not None
            yield from (Import(f"{node.module}.{alias.name}", node.lineno, lazy) for alias in node.names)
        else:
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            inner = lazy or typing_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports_of(node, inner)


def under(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def rule_for(path: str) -> Rule:
    return max((rule for rule in RULES if path.startswith(rule.folder + "/")), key=lambda rule: len(rule.folder))


def breaches(path: str, source: str) -> list[str]:
    """What is wrong with the imports of a file."""
    rule = rule_for(path)
    found = []
    for module, line, lazy in imports_of(ast.parse(source)):
        ours = module.split(".")[0] in (*PACKAGES, "tests", "benchmarks")
        # `fuseq` mounts what others hold, but only when it is called.
        excused = rule.folder == "fuseq" and lazy and under(module, ("serving",))
        if (ours and not under(module, rule.allowed) and not excused) or under(module, rule.forbidden):
            found.append(f"{path}:{line} imports {module}")
    return found


def files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", [path for path in files() if not path.startswith("fuseq/v1/")])
def test_imports_obey_the_floors(path: str) -> None:
    assert breaches(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("serving/engine/x.py", "import grpc"),
        ("serving/rpc/x.py", "def f():\n    from onnxruntime import InferenceSession"),
        ("serving/x.py", "import torch.nn"),
        ("serving/x.py", "from training import loop"),
        ("serving/core/x.py", "from serving.engine import engine"),
        ("training/x.py", "from serving import engine"),
        ("training/x.py", "from export import bundle"),
        ("export/x.py", "from serving.rpc.servicer import TranslatorServicer"),
        ("export/x.py", "def f():\n    from transformers import MarianMTModel"),
        ("fuseq/x.py", "from serving.registry import Registry"),
        ("fuseq/x.py", "import tests.support"),
    ],
)
def test_a_breach_is_seen(path: str, source: str) -> None:
    assert len(breaches(path, source)) == 1


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter holds after `statement`."""
    report = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def module_names(folder: str) -> list[str]:
    names = [path.removesuffix(".py").replace("/", ".") for path in files() if path.startswith(folder)]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def test_serving_and_its_command_load_no_torch() -> None:
    modules = ", ".join(module_names("serving/"))
    call = "import fuseq.cli\nfuseq.cli.cli.get_command(None, 'serve')\nimport onnxruntime"
    loaded = loaded_by(f"import {modules}\n{call}")
    assert not loaded & {"torch", "training", "export", "onnx", "onnxscript"}
    assert {"serving.rpc.server", "onnxruntime"} <= loaded


def test_the_engine_loads_no_grpc() -> None:
    loaded = loaded_by(f"import {', '.join(module_names('serving/engine/'))}")
    assert not loaded & {"grpc", "google.protobuf", "fuseq"}


def test_the_client_loads_no_runtime_and_the_package_nothing() -> None:
    assert not loaded_by("from fuseq import Client") & {"onnxruntime", "serving.engine", "torch", "sentencepiece"}
    assert not loaded_by("import fuseq") & {"grpc", "numpy", "serving", "click"}
