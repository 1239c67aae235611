"""Files are old or new, never half; averages are means; what cannot be loaded is said in one line."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.core.errors import ConfigError, NotFound
from tests.support.toy import TRANSFORMER, toy_config, toy_pairs
from training.checkpoint import (
    average,
    build_model,
    load_tensors,
    load_trained,
    save_tensors,
    write_atomically,
    write_json,
)
from training.config import Vocabulary, parse_config
from training.vocabulary import fit_sentencepiece

KILLED = """
import os, signal, sys
from pathlib import Path
from training.checkpoint import write_atomically

def write(file):
    file.write(b"new, but not all of")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

write_atomically(Path(sys.argv[1]), write)
"""


def test_a_kill_in_the_middle_of_a_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    write_atomically(path, lambda file: file.write(b"new"))  # what the kill left is no obstacle
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_in_the_middle_of_a_write_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", {"ü": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "file.json", {"bad": object()})
    assert json.loads((tmp_path / "file.json").read_text("utf-8")) == {"ü": 1}


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    tree = {"weights": {"a": torch.randn(3, 4), "n": torch.tensor([1, 2])}, "step": 7, "scores": {"bleu": 1.5}}
    save_tensors(tmp_path / "new" / "folder" / "x.pt", tree)
    loaded = load_tensors(tmp_path / "new" / "folder" / "x.pt")
    assert torch.equal(loaded["weights"].pop("a"), tree["weights"]["a"])  # type: ignore[index]
    assert torch.equal(loaded["weights"].pop("n"), tree["weights"]["n"])  # type: ignore[index]
    assert loaded == {"weights": {}, "step": 7, "scores": {"bleu": 1.5}}


class Evil:
    """Would leave a file behind if a checkpoint could run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_a_file_that_is_no_checkpoint_is_one_line_and_runs_nothing(tmp_path: Path) -> None:
    whole = io.BytesIO()
    torch.save({"weights": torch.randn(100)}, whole)
    (tmp_path / "half.pt").write_bytes(whole.getvalue()[:300])
    (tmp_path / "text.pt").write_text("no tensors\nhere", encoding="utf-8")
    torch.save({"weights": Evil(tmp_path / "evidence")}, tmp_path / "evil.pt")
    for name in ("half", "text", "evil"):
        with pytest.raises(ConfigError, match=rf"{name}\.pt cannot be read") as error:
            load_tensors(tmp_path / f"{name}.pt")
        assert "\n" not in str(error.value)
    assert not (tmp_path / "evidence").exists()
    with pytest.raises(NotFound, match=r"nothing\.pt"):
        load_tensors(tmp_path / "nothing.pt")


def test_the_average_is_the_mean_of_floats_and_the_newest_of_the_rest() -> None:
    many = [{"w": torch.full((2,), value), "n": torch.tensor(n)} for n, value in enumerate((1.0, 2.0, 6.0))]
    mean = average(many)
    assert torch.equal(mean["w"], torch.full((2,), 3.0))
    assert mean["w"].dtype == torch.float32
    assert mean["n"] == 2
    # In double precision: what single precision would swallow counts.
    fine = average([{"w": torch.tensor([1e8])}, *[{"w": torch.tensor([1.0])}] * 3])
    assert float(fine["w"]) == pytest.approx((1e8 + 3) / 4, rel=1e-7)
    one = torch.randn(5)
    assert torch.equal(average([{"w": one}])["w"], one)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as a training leaves it, with weights nobody trained."""
    folder = tmp_path_factory.mktemp("run")
    config = parse_config(toy_config(folder / "data", TRANSFORMER))
    vocabulary = fit_sentencepiece([text for pair in toy_pairs(100) for text in pair], Vocabulary(size=300))
    (folder / "vocabulary.model").write_bytes(vocabulary)
    write_json(folder / "config.json", config.model_dump(mode="json"))
    write_json(folder / "details.json", {"pairs": 100})
    from serving.core.codecs import SentencePieceCodec

    for step in (4, 8):
        torch.manual_seed(step)
        weights = build_model(config, SentencePieceCodec(vocabulary)).state_dict()
        save_tensors(folder / "snapshots" / f"{step}.pt", {"weights": weights, "step": step})
    save_tensors(folder / "best.pt", {"weights": weights, "step": 8, "scores": {"bleu": 12.5}})
    save_tensors(folder / "state.pt", {"model": weights, "progress": {"step": 9}})
    return folder


def test_a_run_is_loaded_from_its_folder_or_a_file_in_it(run: Path) -> None:
    best = load_trained(run)
    assert not best.model.training
    assert best.details == {"pairs": 100, "step": 8, "scores": {"bleu": 12.5}}
    assert best.codec.size == 300
    assert load_trained(run / "best.pt").details == best.details
    earlier, latest = load_trained(run / "snapshots" / "4.pt"), load_trained(run / "state.pt")
    assert (earlier.details["step"], latest.details["step"]) == (4, 9)
    name = "projection.weight"
    assert torch.equal(latest.model.state_dict()[name], best.model.state_dict()[name])
    assert not torch.equal(earlier.model.state_dict()[name], best.model.state_dict()[name])


def copy_of(run: Path, to: Path, **changed: bytes | None) -> Path:
    """The run with some files replaced, or left out for None."""
    to.mkdir()
    for name in ("config.json", "vocabulary.model", "details.json", "best.pt"):
        content = changed.get(name.replace(".", "_"), (run / name).read_bytes())
        if content is not None:
            (to / name).write_bytes(content)
    return to


@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        ({"config_json": None}, NotFound, r"config\.json"),
        ({"vocabulary_model": None}, NotFound, r"vocabulary\.model"),
        ({"best_pt": None}, NotFound, "not been evaluated yet"),
        ({"config_json": b"{"}, ConfigError, r"config\.json cannot be read"),
        ({"details_json": b"7"}, ConfigError, r"details\.json cannot be read"),
        ({"best_pt": b"junk"}, ConfigError, r"best\.pt cannot be read"),
    ],
)
def test_a_broken_run_is_one_line(run: Path, tmp_path: Path, changed: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text) as error:
        load_trained(copy_of(run, tmp_path / "broken", **changed))
    assert "\n" not in str(error.value)


def test_weights_of_another_model_are_one_line(run: Path, tmp_path: Path) -> None:
    config = json.loads((run / "config.json").read_text("utf-8"))
    config["model"]["feed_forward"] = 65
    other = copy_of(run, tmp_path / "other", config_json=json.dumps(config).encode())
    with pytest.raises(ConfigError, match="does not fit") as error:
        load_trained(other)
    assert "\n" not in str(error.value)


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="not a training run"):
        load_trained(tmp_path)
    with pytest.raises(NotFound, match="not a training run"):
        load_trained(tmp_path / "missing")
