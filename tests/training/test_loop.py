"""Training learns, and a run killed at any moment ends where the uninterrupted one does."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving.core.errors import ConfigError
from tests.support.toy import BAHDANAU, TRANSFORMER, toy_config
from training.checkpoint import load_tensors, load_trained
from training.config import parse_config
from training.loop import read_log
from training.metrics import DegenerateOutputs
from training.runner import train

# Runs lives of one training, each in a process of its own that is killed with SIGKILL at the n-th call of a function.
# The lives are forked from a process that has loaded all they need (optimisers load torch._dynamo) and has not computed
# anything yet. They draw no pictures, which would take most of their time.
DRIVER = """
import json, os, signal, sys
from pathlib import Path

import torch._dynamo
import training.loop, training.runner
from training.config import parse_config

training.runner.plot_run = lambda entries, path, title: None


def die_at(original, count, before_death=lambda *args: None):
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count:
            before_death(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    return wrapped


def half_written(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("." + path.name + ".partial").write_bytes(b"half")


def live(tree, run, place, count):
    if place == "step":
        training.loop.losses.cross_entropy = die_at(training.loop.losses.cross_entropy, count)
    elif place == "write":
        training.loop.save_tensors = die_at(training.loop.save_tensors, count, half_written)
    elif place == "evaluation":
        training.runner.decode = die_at(training.runner.decode, count)
    training.runner.train(parse_config(tree), Path(run), resume=True)


tree, lives = (json.loads(argument) for argument in sys.argv[1:])
statuses = []
for run, place, count in lives:
    child = os.fork()
    if child == 0:
        live(tree, run, place, count)
        os._exit(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(statuses))
"""
TO_THE_END = ("nowhere", 0)


def run_lives(tree: dict[str, Any], lives: list[tuple[str, str, int]]) -> list[int]:
    """Exit codes of the lives (run, place of death, count), one after the other; a negative one is a signal."""
    command = [sys.executable, "-c", DRIVER, json.dumps(tree), json.dumps(lives)]
    done = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE)
    return list(json.loads(done.stdout.splitlines()[-1]))


def weight_hash(file: Path) -> str:
    saved = load_tensors(file)
    weights = saved.get("weights") or saved["model"]
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("model", [TRANSFORMER, BAHDANAU], ids=["transformer", "bahdanau"])
def test_killed_and_resumed_training_equals_the_uninterrupted_one(model: dict[str, Any], tmp_path: Path) -> None:
    tree = toy_config(tmp_path / "data", model)
    run = tmp_path / "killed"
    # Each life ends at another place: inside a step, while a file is half written, inside an evaluation.
    deaths = [("step", 2), ("write", 1), ("evaluation", 1), ("write", 4), ("step", 4), ("evaluation", 1)]
    lives = [(str(run), *death) for death in (*deaths, TO_THE_END)]
    statuses = run_lives(tree, [(str(tmp_path / "whole"), *TO_THE_END), *lives])
    assert statuses == [0, *[-signal.SIGKILL] * len(deaths), 0]
    for file in ("state.pt", "best.pt"):
        assert weight_hash(run / file) == weight_hash(tmp_path / "whole" / file), file
    whole, killed = load_tensors(tmp_path / "whole" / "state.pt"), load_tensors(run / "state.pt")
    assert whole["random"].equal(killed["random"])
    assert whole["progress"] == killed["progress"]
    logs = [[{k: v for k, v in e.items() if k != "time"} for e in read_log(r)] for r in (tmp_path / "whole", run)]
    assert logs[0] == logs[1]
    assert [entry["step"] for entry in logs[0]] == [4, 8, 12]


@pytest.mark.parametrize(("model", "steps"), [(TRANSFORMER, 180), (BAHDANAU, 260)], ids=["transformer", "bahdanau"])
def test_training_learns_the_toy_language(model: dict[str, Any], steps: int, tmp_path: Path) -> None:
    settings = {"schedule": {"steps": steps, "warmup": 20}, "evaluation": {"every": steps, "average": 1}}
    tree = toy_config(tmp_path / "data", model, **settings, optimiser={"name": "muon", "rate": 0.003})
    progress = train(parse_config(tree), tmp_path / "run")
    assert progress.best["bleu"] > 15  # a model that ignores its source stays under 5
    trained = load_trained(tmp_path / "run")
    assert not trained.model.training
    assert trained.details["pairs"] == 400
    assert trained.details["scores"]["bleu"] == progress.best["bleu"]
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_degenerate_development_set_fails_the_run(tmp_path: Path) -> None:
    still = {"optimiser": {"rate": 0.0}, "evaluation": {"degenerate_from": 0.0, "every": 2}}
    tree = toy_config(tmp_path / "data", TRANSFORMER, **still, schedule={"steps": 4})
    with pytest.raises(DegenerateOutputs):
        train(parse_config(tree), tmp_path / "run")


def test_a_folder_with_a_run_is_not_overwritten_nor_resumed_as_another(tmp_path: Path) -> None:
    tree = toy_config(tmp_path / "data", TRANSFORMER, schedule={"steps": 2, "warmup": 0})
    train(parse_config(tree), tmp_path / "run")
    with pytest.raises(ConfigError, match="--resume"):
        train(parse_config(tree), tmp_path / "run")
    tree["optimiser"]["rate"] = 0.5
    with pytest.raises(ConfigError, match="another optimiser"):
        train(parse_config(tree), tmp_path / "run", resume=True)


def test_early_stopping_after_patience(tmp_path: Path) -> None:
    settings = {"optimiser": {"rate": 0.0}, "evaluation": {"every": 1, "patience": 2}}
    tree = toy_config(tmp_path / "data", TRANSFORMER, **settings, schedule={"steps": 50})
    progress = train(parse_config(tree), tmp_path / "run")
    assert progress.step == 3
    assert progress.best["step"] == 1
