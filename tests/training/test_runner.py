"""What a run takes, what it refuses, what it leaves behind, and how an interrupted one goes on."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.core.errors import ConfigError, FuseqError
from tests.support.toy import TRANSFORMER, toy_config, toy_pairs
from training import loop, runner
from training.checkpoint import load_tensors, read_json
from training.config import Vocabulary, parse_config
from training.loop import Progress, Tick, read_log
from training.metrics import DegenerateOutputs
from training.vocabulary import fit_sentencepiece


class Cut(BaseException):
    """Ends a training from outside, as a kill between two steps would."""


def train(tree: dict[str, Any], run: Path, *, resume: bool = False, cut_at: int = 0, **options: Any) -> Progress | None:
    """Train; with `cut_at` to that step only, and return None."""

    def on_step(tick: Tick) -> None:
        if tick.step == cut_at:
            raise Cut

    try:
        return runner.train(parse_config(tree), run, resume=resume, on_step=on_step, **options)
    except Cut:
        return None


def same_weights(one: Path, other: Path) -> bool:
    first, second = load_tensors(one / "state.pt")["model"], load_tensors(other / "state.pt")["model"]
    return all(torch.equal(first[name], second[name]) for name in first)


def log_of(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "time"} for entry in read_log(run)]


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    return toy_config(tmp_path / "data", TRANSFORMER, evaluation={"sentences": 4})


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the logs that were drawn: pictures take longer than these trainings."""
    lengths: list[int] = []
    monkeypatch.setattr(runner, "plot_run", lambda entries, path, title: lengths.append(len(entries)))
    return lengths


def test_a_run_cut_long_after_its_last_save_finds_the_snapshots_of_that_save(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    tree["schedule"]["steps"] = 8
    tree["evaluation"] |= {"every": 1, "average": 2, "sentences": 1}
    tree["run"]["save_every"] = 5
    train(tree, tmp_path / "whole")
    train(tree, tmp_path / "cut", cut_at=5)  # before anything was saved
    assert not (tmp_path / "cut" / "state.pt").exists()
    train(tree, tmp_path / "cut", resume=True, cut_at=8)
    assert sorted(int(file.stem) for file in (tmp_path / "cut" / "snapshots").glob("*.pt")) == [4, 5, 6, 7]
    train(tree, tmp_path / "cut", resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "cut")
    assert [entry["step"] for entry in log_of(tmp_path / "cut")] == list(range(1, 9))


def test_a_finished_run_goes_on_when_it_is_given_more_steps(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["schedule"]["steps"] = 4
    first = train(tree, tmp_path / "run")
    assert first is not None
    assert first.finished
    again = train(tree, tmp_path / "run", resume=True)
    assert again == first
    tree["schedule"]["steps"] = 8
    more = train(tree, tmp_path / "run", resume=True)
    assert more is not None
    assert (more.step, more.finished) == (8, True)
    assert [entry["step"] for entry in log_of(tmp_path / "run")] == [4, 8]


def test_a_start_that_came_to_nothing_leaves_nothing_in_the_way(tree: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tree, run, cut_at=1)
    (run / "log.jsonl").write_text('{"step": 4, "bleu": 99.0}\n', encoding="utf-8")
    tree["vocabulary"]["model"] = "bpe"
    before = (run / "vocabulary.model").read_bytes()
    train(tree, run)
    assert (run / "vocabulary.model").read_bytes() != before
    assert [entry["step"] for entry in log_of(run)] == [4, 8, 12]


def test_a_picture_is_drawn_at_every_evaluation(tree: dict[str, Any], tmp_path: Path, drawn: list[int]) -> None:
    train(tree, tmp_path / "run")
    assert drawn == [1, 2, 3]


def test_provenance_is_the_configurations_else_the_splits(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["schedule"]["steps"] = 1
    split = {"sha256": "abc", "provenance": {"name": "Pairs", "licence": "CC BY", "attribution": "all of them"}}
    (tmp_path / "data" / "split.json").write_text(json.dumps(split), encoding="utf-8")
    train(tree, tmp_path / "run")
    details = read_json(tmp_path / "run" / "details.json")
    named = {key: details[key] for key in ("data", "licence", "attribution", "split", "pairs", "dev_sentences")}
    assert named == {
        "data": "Pairs",
        "licence": "CC0",  # the configuration says so
        "attribution": "all of them",
        "split": split,
        "pairs": 400,
        "dev_sentences": 4,
    }


def test_a_run_is_resumed_with_the_data_and_seed_it_was_started_with(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["schedule"]["steps"] = 2
    train(tree, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"another run\.seed"):
        train({**tree, "run": {**tree["run"], "seed": 2}}, tmp_path / "run", resume=True)
    source = Path(tree["data"]["train"]["source"])
    source.write_text(source.read_text("utf-8").replace("dog", "cat", 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"corpus .* has changed"):
        train(tree, tmp_path / "run", resume=True)


def test_two_trainings_do_not_share_a_folder(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another training is writing"):
            train(tree, tmp_path / "run")
    train(tree, tmp_path / "run", cut_at=1)


@pytest.mark.parametrize(
    ("part", "text", "message"),
    [
        ("train", "x " * 80 + "\n", r"none of the 3 pairs of data\.train is within the limits"),
        ("dev", "", r"data\.dev has no pair"),
    ],
)
def test_a_corpus_that_nothing_is_left_of_is_an_error(
    tree: dict[str, Any], tmp_path: Path, part: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in ("source", "target"):
        Path(tree["data"][part][side]).write_text(text * 3, encoding="utf-8")
    if part == "train":  # too little to fit a codec on
        fitted = fit_sentencepiece([text for pair in toy_pairs(100) for text in pair], Vocabulary(size=300))
        monkeypatch.setattr(runner, "fit_sentencepiece", lambda sentences, settings: fitted)
    with pytest.raises(ConfigError, match=message):
        train(tree, tmp_path / "run")


def test_development_sentences_over_the_limits_do_no_harm(tree: dict[str, Any], tmp_path: Path) -> None:
    sides = [Path(tree["data"]["dev"][side]) for side in ("source", "target")]
    longer = [("one " * 90, "eins"), ("one two", "eins " * 90), ("", "")]
    for index, path in enumerate(sides):
        path.write_text(path.read_text("utf-8") + "".join(pair[index] + "\n" for pair in longer), encoding="utf-8")
    tree["schedule"]["steps"] = 1
    tree["evaluation"]["sentences"] = 30
    notes: list[str] = []
    train(tree, tmp_path / "run", on_note=notes.append)
    assert read_json(tmp_path / "run" / "details.json")["dev_sentences"] == 22  # a long target can still be a reference
    assert any(note.startswith("1 development sentences are over limits.source") for note in notes)


def test_numbers_that_are_none_end_the_run_before_they_are_saved(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree["run"]["save_every"] = 1
    original = loop.losses.cross_entropy
    calls = 0

    def cross_entropy(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        loss, count = original(*arguments)
        # The loss of the third step is a number, its gradient is not.
        return (loss + 0 * (loss - loss.detach()).sqrt(), count) if calls == 3 else (loss, count)

    monkeypatch.setattr(loop.losses, "cross_entropy", cross_entropy)
    with pytest.raises(FuseqError, match="not a number at step 2"):
        train(tree, tmp_path / "run")
    state = load_tensors(tmp_path / "run" / "state.pt")
    assert state["progress"]["step"] == 2
    assert all(bool(tensor.isfinite().all()) for tensor in state["model"].values())


def test_a_run_that_stops_early_is_judged_at_its_end(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["optimiser"]["rate"] = 0.0
    tree["evaluation"] |= {"every": 1, "patience": 1, "degenerate_from": 0.9}
    with pytest.raises(DegenerateOutputs):
        train(tree, tmp_path / "run")
    assert [entry["step"] for entry in log_of(tmp_path / "run")] == [1, 2]  # of twelve


def test_a_corpus_may_be_one_file(tree: dict[str, Any], tmp_path: Path) -> None:
    sides = [Path(tree["data"]["train"][side]).read_text("utf-8").splitlines() for side in ("source", "target")]
    (tmp_path / "pairs.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in zip(*sides, strict=True)), encoding="utf-8")
    tree["schedule"]["steps"] = 4
    train(tree, tmp_path / "two")
    tree["data"]["train"] = {"file": str(tmp_path / "pairs.tsv")}
    train(tree, tmp_path / "one")
    assert same_weights(tmp_path / "one", tmp_path / "two")
    tree["data"]["train"] = {"source": "only.txt"}
    with pytest.raises(ConfigError, match="needs `source` and `target`"):
        train(tree, tmp_path / "neither")


def test_bfloat16_is_for_the_arithmetic_and_not_for_the_weights(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["schedule"]["steps"] = 2
    for precision in ("fp32", "bf16"):
        tree["run"]["precision"] = precision
        train(tree, tmp_path / precision)
    weights = {p: load_tensors(tmp_path / p / "state.pt")["model"]["projection.weight"] for p in ("fp32", "bf16")}
    assert weights["bf16"].dtype == torch.float32
    assert not torch.equal(weights["fp32"], weights["bf16"])
    torch.testing.assert_close(weights["fp32"], weights["bf16"], atol=0.05, rtol=0)


def test_cuda_that_is_not_there_is_said(tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tree["run"]["device"] = "cuda"
    with pytest.raises(ConfigError, match=r"run\.device is cuda"):
        train(tree, tmp_path / "run")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_cuda_is_cut_and_resumed(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["run"]["device"] = "cuda"
    train(tree, tmp_path / "run", cut_at=7)
    progress = train(tree, tmp_path / "run", resume=True)
    assert progress is not None
    assert progress.step == 12
    tree["run"]["device"] = "cpu"  # what it leaves can be used where there is no such device
    assert train(tree, tmp_path / "run", resume=True) == progress
