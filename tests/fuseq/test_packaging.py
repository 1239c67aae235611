"""What is installed: the stubs, the pins, the contents of the wheel."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import fuseq
from fuseq import bundled_model
from hatch_build import generate
from serving.core.errors import NotFound
from serving.core.manifest import open_bundle
from tests.serving.rpc.harness import READY

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LARGEST_BUNDLE = 16 * 10**6


def pins() -> dict[str, Version]:
    """Name -> version in constraints.txt, where every line must pin exactly."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    found = [re.fullmatch(r"([a-z0-9-]+)==([\w.!]+)", line) for line in lines if line and not line.startswith("#")]
    assert all(found)
    return {match[1]: Version(match[2]) for match in found if match}


def asked_for() -> list[Requirement]:
    """Every requirement of the project, build and extras included."""
    project = PROJECT["project"]
    texts = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    texts += [text for extra in project["optional-dependencies"].values() for text in extra]
    return [found for found in map(Requirement, texts) if found.name != "fuseq"]


@pytest.mark.parametrize("requirement", asked_for(), ids=str)
def test_every_requirement_is_pinned_to_a_version_that_satisfies_it(requirement: Requirement) -> None:
    version = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


def test_what_the_requirements_need_is_pinned_too() -> None:
    pinned, seen = set(pins()), set()
    todo = [canonicalize_name(requirement.name) for requirement in asked_for()]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # an extra that is not installed here
            continue
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                todo.append(canonicalize_name(need.name))
    assert seen - pinned == set()
    assert len(seen) > 40


def test_the_runtime_is_as_new_as_the_generator_of_the_stubs() -> None:
    requirements = {requirement.name: requirement.specifier for requirement in asked_for()}
    [tools] = [Requirement(text) for text in PROJECT["build-system"]["requires"] if text.startswith("grpcio-tools")]
    [exact] = tools.specifier
    assert exact.operator == "=="
    assert not requirements["grpcio"].contains("1.85.0")
    stubs = (ROOT / "fuseq/v1/translator_pb2.py").read_text("utf-8")
    [generated] = re.findall(r"^# Protobuf Python Version: (\S+)$", stubs, re.M)
    for name, least in (("grpcio", exact.version), ("protobuf", generated)):
        bounds = [Version(bound.version) for bound in requirements[name] if bound.operator == ">="]
        assert bounds
        assert bounds[0] >= Version(least)


def test_the_stubs_in_use_are_those_of_the_protocol(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    generate(tmp_path)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "fuseq/v1").iterdir()}
    assert {"__init__.py", "translator_pb2.py", "translator_pb2.pyi", "translator_pb2_grpc.py"} == set(fresh)
    in_use = Path(fuseq.__file__).parent / "v1"
    assert {name: (in_use / name).read_bytes() for name in fresh} == fresh, "stale stubs: run make setup"


def test_the_stubs_are_not_in_git() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "ls-files", "fuseq/v1"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_every_part_of_the_protocol_has_a_comment() -> None:
    lines = (ROOT / "protos/fuseq/v1/translator.proto").read_text("utf-8").splitlines()
    declared = re.compile(r"\s+(rpc \w+|(repeated |optional )?[\w.]+ \w+ = \d+;|[A-Z_]+ = \d+;)")
    found = [number for number, line in enumerate(lines) if declared.match(line)]
    assert len(found) > 60
    bare = [lines[number].strip() for number in found if not lines[number - 1].strip().startswith("//")]
    assert bare == []


def test_the_bundled_model_is_whole_and_small() -> None:
    try:
        path = bundled_model()
    except NotFound:
        pytest.skip("this checkout has no bundled model")
    bundle = open_bundle(path)
    assert bundle.manifest.default_precision == "int8"
    assert bundle.manifest.provenance.attribution
    assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) <= LARGEST_BUNDLE


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [path] = folder.iterdir()
    return path


def test_the_wheel_holds_the_packages_and_the_stubs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"training", "export", "serving", "fuseq", f"fuseq-{fuseq.__version__}.dist-info"}
    assert {"fuseq/v1/translator_pb2.py", "fuseq/v1/translator_pb2_grpc.py", "fuseq/v1/__init__.py"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]
    bundled = {str(path.relative_to(ROOT)) for path in (ROOT / "fuseq/models").rglob("*") if path.is_file()}
    assert bundled <= set(names)


@pytest.mark.slow
def test_the_wheel_serves_in_a_bare_environment(wheel: Path, attending: Path, tmp_path: Path) -> None:
    home = tmp_path / "bare"
    venv.create(home, with_pip=True)
    python = str(home / "bin/python")
    install = [python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), f"{wheel}[cpu]"]
    subprocess.run(install, cwd=tmp_path, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ports = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    named: list[Path] = []  # the bundled model
    try:
        bundled_model()
    except NotFound:
        named = [attending]
    server = subprocess.Popen(
        [home / "bin/fuseq", "serve", *named, *ports], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        found = next(match for line in server.stderr if (match := READY.search(line)))
        ask = f"import fuseq; print(len(fuseq.Client('127.0.0.1:{found[1]}').translate('A cat.').tokens))"
        done = subprocess.run([python, "-c", ask], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert int(done.stdout) > 0, done.stderr
    finally:
        server.send_signal(signal.SIGTERM)
        _, rest = server.communicate(timeout=30)
    assert server.returncode == 0, rest
