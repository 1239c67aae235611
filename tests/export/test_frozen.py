"""Bundles written by the first version, which every later one must load and serve as it was (case 34).

Both are models of a toy language, trained for a minute and never to be exported again; `frozen-v1.json` holds what
they said on the day they were frozen.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.core.errors import BundleDamaged, BundleTooNew
from serving.core.manifest import MANIFEST_NAME, NEWEST_IR, NEWEST_OPSET, SCHEMA_VERSION, open_bundle
from serving.core.types import SearchOptions
from serving.engine.engine import Engine
from serving.engine.sessions import open_stages
from serving.engine.translator import Translation, Translator

DATA = Path(__file__).resolve().parent.parent / "data"
RECORDED: list[dict[str, Any]] = json.loads((DATA / "frozen-v1.json").read_text(encoding="utf-8"))
FROZEN = DATA / "frozen-v1"


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: f"{r['bundle']}-{r['precision']}-{r['beam']}")
def test_case_34_a_frozen_bundle_says_what_it_said(recorded: dict[str, Any]) -> None:
    bundle = open_bundle(DATA / recorded["bundle"])
    with Engine(bundle, open_stages(bundle, recorded["precision"], "cpu", 1)) as engine:
        texts = [one["input"] for one in recorded["answers"]]
        found = Translator(bundle, engine).translate(texts, SearchOptions(beam=recorded["beam"]), align=True)
    for one, answer in zip(found, recorded["answers"], strict=True):
        assert isinstance(one, Translation)
        assert (one.text, list(one.tokens), str(one.stop_reason)) == (answer["text"], answer["tokens"], answer["stop"])
        assert one.score == pytest.approx(answer["score"], abs=0.03)
        assert one.alignment is not None
        assert np.allclose(one.alignment, answer["alignment"], atol=0.03)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FROZEN, tmp_path / "bundle"))


@pytest.mark.parametrize("name", sorted(open_bundle(FROZEN).manifest.files))
def test_case_34_every_truncated_or_altered_file_is_named(copy: Path, name: str) -> None:
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(BundleDamaged, match=f"{name} is truncated"):
        open_bundle(copy)
    (copy / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BundleDamaged, match=f"{name} was altered"):
        open_bundle(copy)
    (copy / name).unlink()
    with pytest.raises(BundleDamaged, match=f"{name} is missing"):
        open_bundle(copy)


@pytest.mark.parametrize(
    ("place", "newest", "word"),
    [
        (("schema_version",), SCHEMA_VERSION, "schema"),
        (("tools", "opset"), NEWEST_OPSET, "opset"),
        (("tools", "ir"), NEWEST_IR, "ir"),
    ],
)
def test_case_34_a_bundle_that_is_too_new_names_both_versions(
    copy: Path, place: tuple[str, ...], newest: int, word: str
) -> None:
    file = copy / MANIFEST_NAME
    manifest = json.loads(file.read_text(encoding="utf-8"))
    inner = manifest
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = newest + 1
    file.write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BundleTooNew) as caught:
        open_bundle(copy)
    for part in (word, str(newest), str(newest + 1)):
        assert part in str(caught.value)


def test_case_34_a_truncated_manifest_is_named(copy: Path) -> None:
    file = copy / MANIFEST_NAME
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(BundleDamaged, match=r"manifest\.json is truncated or altered"):
        open_bundle(copy)
