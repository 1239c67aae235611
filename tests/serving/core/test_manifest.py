"""A bundle that is too new, truncated or altered is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.core.errors import BundleDamaged, BundleError, BundleTooNew, NotFound
from serving.core.manifest import MANIFEST_NAME, SCHEMA_VERSION, open_bundle
from serving.core.state_spec import Role
from tests.serving.engine.tiny import write_bundle


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "whole", "attending").path


@pytest.fixture
def bundle(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "bundle"))


def edit(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = bundle / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_whole_bundle_opens(bundle: Path) -> None:
    opened = open_bundle(str(bundle))
    assert opened.manifest.special_ids().eos == 2
    spec = opened.manifest.state_spec()
    assert [tensor.name for tensor in spec.of(Role.CACHE)][:2] == ["self_key_0", "self_value_0"]
    assert opened.graphs().graphs["step"] == "step.onnx"
    assert opened.graphs("fp32") == opened.graphs(None)
    assert opened.file("step.onnx").is_file()
    with pytest.raises(NotFound, match=r"no precision 'int4'; it holds fp32"):
        opened.graphs("int4")


def test_fields_of_a_newer_writer_are_ignored(bundle: Path) -> None:
    edit(bundle, lambda manifest: manifest.update(colour="blue", limits={**manifest["limits"], "depth": 3}))
    assert open_bundle(bundle).manifest.name == "tiny-attending"


@pytest.mark.parametrize("name", ["step.onnx", "text.model"])
def test_a_missing_file_is_named(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    with pytest.raises(BundleDamaged, match=f"{name} is missing"):
        open_bundle(bundle)


@pytest.mark.parametrize("name", ["step.onnx", "text.model"])
def test_a_truncated_file_is_named(bundle: Path, name: str) -> None:
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(content[:-1])
    with pytest.raises(BundleDamaged, match=f"{name} is truncated"):
        open_bundle(bundle)


@pytest.mark.parametrize("at", [0, 100, -1])
def test_a_single_altered_byte_is_found(bundle: Path, at: int) -> None:
    content = bytearray((bundle / "encode.onnx").read_bytes())
    content[at] ^= 1
    (bundle / "encode.onnx").write_bytes(content)
    with pytest.raises(BundleDamaged, match=r"encode.onnx was altered"):
        open_bundle(bundle)


def test_no_bundle_at_all(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(NotFound, match="not a bundle"):
            open_bundle(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\x00\xff", "null", "[" * 100_000, '{"a":' * 100_000])
def test_a_manifest_that_is_no_object(bundle: Path, text: str) -> None:
    (bundle / MANIFEST_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleDamaged, match=MANIFEST_NAME):
        open_bundle(bundle)


def test_case_34_what_is_too_new_is_refused_with_both_versions(bundle: Path) -> None:
    edit(bundle, lambda manifest: manifest.update(schema_version=SCHEMA_VERSION + 1, state="of a new kind"))
    with pytest.raises(BundleTooNew, match=rf"schema {SCHEMA_VERSION + 1} is newer than this fuseq's {SCHEMA_VERSION}"):
        open_bundle(bundle)
    edit(bundle, lambda manifest: manifest.update(schema_version=SCHEMA_VERSION, tools={"opset": 99, "ir": 10}))
    with pytest.raises(BundleTooNew, match=r"opset 99 is newer than the \d+ supported"):
        open_bundle(bundle)
    edit(bundle, lambda manifest: manifest.update(tools={"opset": 21, "ir": 99}))
    with pytest.raises(BundleTooNew, match=r"ir 99 is newer than the \d+ supported"):
        open_bundle(bundle)


def drop(*keys: str) -> Callable[[dict[str, Any]], object]:
    def change(manifest: dict[str, Any]) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        del manifest[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (drop("schema_version"), "no schema version"),
        (drop("limits"), "limits: Field required"),
        (drop("special", "eos"), "special.eos: Field required"),
        (drop("files", "step.onnx"), "step.onnx.*have no hash"),
        (lambda manifest: manifest.update(default_precision="int8"), "default precision 'int8' is not in it"),
        (lambda manifest: manifest["files"].update({"../x": {"sha256": "", "bytes": 0}}), "leaves the folder"),
        (lambda manifest: manifest["files"].update({"/etc/passwd": {"sha256": "", "bytes": 0}}), "leaves the folder"),
        (lambda manifest: manifest["state"][0].update(axes=["source"]), "first axis must be 'row'"),
        (lambda manifest: manifest["state"][0].update(role="spare"), "state.0.role"),
        (lambda manifest: manifest["state"][0].update(dtype="foo"), "unknown type 'foo'"),
        (lambda manifest: manifest["state"][0].update(axes=["row", -2, "time", 8]), "at least 1"),
        (lambda manifest: manifest["state"].append(manifest["state"][0]), "different names"),
        (lambda manifest: manifest.update(tools=[1]), "tools: "),
        (lambda manifest: manifest.update(tools="new"), "tools: "),
        (lambda manifest: manifest["limits"].update(source=0), "limits.source"),
        (lambda manifest: manifest["limits"].update(target=-1), "limits.target"),
        (lambda manifest: manifest["special"].update(bos=-1), "special.bos"),
        (lambda manifest: manifest["special"].update(unk=99_999), "outside the vocabulary"),
        (lambda manifest: manifest.update(search={"beam": 0}), "search.beam"),
        (lambda manifest: manifest.update(search={"length_normalisation": "none"}), "search.length_normalisation"),
        (lambda manifest: manifest.update(search={"banned": [-1]}), "search.banned"),
        (lambda manifest: manifest["source_codec"].update(vocabulary="v.json"), "v.json.*have no hash"),
        (lambda manifest: manifest.update(search={"length_penalty": float("nan")}), "search.length_penalty"),
        (lambda manifest: manifest.update(search={"max_length_ratio": float("inf")}), "search.max_length_ratio"),
        (lambda manifest: manifest.update(name=""), "name: "),
        (lambda manifest: manifest.update(name="a\nb"), "name: .*one line"),
        (lambda manifest: manifest.update(name="\ud800"), "name: "),
        (lambda manifest: manifest["files"].update({"a" * 5000: {"sha256": "", "bytes": 0}}), "cannot be read"),
    ],
)
def test_a_manifest_that_contradicts_itself(
    bundle: Path, change: Callable[[dict[str, Any]], object], match: str
) -> None:
    edit(bundle, change)
    with pytest.raises(BundleError, match=match) as caught:
        open_bundle(bundle).manifest.state_spec()
    assert "\n" not in str(caught.value)
