"""The commands as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

from fuseq import Client, bundled_model
from fuseq.cli import COMMANDS, cli
from serving.core.errors import NotFound, Unavailable
from tests.serving.rpc.harness import Running

TEXTS = ["the cat sat on the mat", "", "a dog  ran", "   ", "rain"]
FAST = ["--max-length-ratio", "0.5", "--max-length-margin", "6"]


def fuseq(*arguments: str, stdin: bytes | None = None, status: int = 0, **environment: str) -> tuple[str, str]:
    """Standard output and standard error of a run."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQ_")}
    done = subprocess.run(
        [sys.executable, "-m", "fuseq", *arguments],
        input=stdin or b"",
        capture_output=True,
        env={**inherited, **environment},
        timeout=60,
    )
    assert done.returncode == status, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


@pytest.fixture(scope="module")
def expected(shared: Running) -> list[Any]:
    with shared.client() as client:
        return client.translate(TEXTS, max_length_ratio=0.5, max_length_margin=6)


@pytest.mark.parametrize("place", ["bundle", "server", "environment"])
def test_translate_gives_a_line_a_line(shared: Running, attending: Path, expected: list[Any], place: str) -> None:
    flags = {"bundle": ["--bundle", str(attending)], "server": ["--server", shared.address], "environment": []}[place]
    environment = {"FUSEQ_BUNDLE": str(attending)} if place == "environment" else {}
    out, err = fuseq("translate", *flags, *FAST, stdin="\n".join(TEXTS).encode(), **environment)
    lines = out.split("\n")
    assert lines[-1] == ""
    assert lines[:-1] == [" ".join(answer.text.split("\n")) for answer in expected]
    assert err == ""


@pytest.mark.parametrize("place", ["bundle", "server"])
def test_json_has_every_field_and_is_the_same_from_both(shared: Running, attending: Path, place: str) -> None:
    flags = ["--bundle", str(attending)] if place == "bundle" else ["--server", shared.address]
    options = ["--beam", "3", "--nbest", "2", "--alignments", "--prefix", "the", *FAST]
    out, _ = fuseq("translate", *flags, *options, "--json", TEXTS[0], "")
    first, blank = map(json.loads, out.splitlines())
    fields = ["input", "text", "score", "tokens", "stop_reason", "truncated", "alignment", "hypotheses"]
    assert list(first) == list(blank) == fields
    assert first["input"] == TEXTS[0]
    assert blank["text"] == ""
    assert first["text"].startswith("the")
    assert len(first["hypotheses"]) == 2
    assert len(first["alignment"]["weights"]) == len(first["tokens"]) + 1
    with shared.client() as client:
        answer = client.translate(
            TEXTS[0], beam=3, nbest=2, alignments=True, prefix="the", max_length_ratio=0.5, max_length_margin=6
        )
    assert first["tokens"] == list(answer.tokens)
    assert first["score"] == pytest.approx(answer.score, abs=1e-5)
    assert first["stop_reason"] == answer.stop_reason


def test_alignments_are_drawn_and_nbest_comes_with_scores(attending: Path) -> None:
    out, _ = fuseq("translate", "--bundle", str(attending), "--alignments", *FAST, TEXTS[0])
    assert "█" in out or "▓" in out or "▒" in out or "░" in out
    out, _ = fuseq("translate", "--bundle", str(attending), "--nbest", "3", *FAST, TEXTS[0])
    scores = [float(line.split("\t")[0]) for line in out.splitlines() if "\t" in line]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


def test_a_bad_line_keeps_its_place_and_the_status_says_so(attending: Path) -> None:
    lines = [b"the cat", b"\xff\xfe", b"z" * 500, b"a dog"]
    out, err = fuseq("translate", "--bundle", str(attending), *FAST, stdin=b"\n".join(lines), status=1)
    first, bad, over, last, end = out.split("\n")
    assert first
    assert last
    assert bad == over == end == ""
    assert [line.split(": ")[:2] for line in err.splitlines()] == [["fuseq", "line 2"], ["fuseq", "line 3"]]
    out, _ = fuseq("translate", "--bundle", str(attending), "--json", *FAST, stdin=b"\n".join(lines), status=1)
    objects = [json.loads(line) for line in out.splitlines()]
    assert ["error" in found for found in objects] == [False, True, True, False]


def test_a_truncated_line(attending: Path) -> None:
    out, _ = fuseq("translate", "--bundle", str(attending), "--truncate", "--json", *FAST, "z" * 500)
    assert json.loads(out)["truncated"] is True


def test_answers_flow_while_the_input_stays_open(attending: Path) -> None:
    command = [sys.executable, "-m", "fuseq", "translate", "--bundle", str(attending), *FAST]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for text in (b"the cat\n", b"\n", b"a dog\n"):
            process.stdin.write(text)
            process.stdin.flush()
            line = process.stdout.readline()  # comes although more input may follow
            assert line.endswith(b"\n")
            assert (line == b"\n") == (text == b"\n")
        process.stdin.close()
        assert process.wait(30) == 0


def test_many_lines_keep_their_order(attending: Path) -> None:
    texts = [f"number {number}" for number in range(300)]
    out, _ = fuseq("translate", "--bundle", str(attending), "--json", *FAST, stdin="\n".join(texts).encode())
    assert [json.loads(line)["input"] for line in out.splitlines()] == texts


def test_a_reader_that_leaves_early_is_no_traceback(attending: Path) -> None:
    command = (
        f"yes cat | head -3000 | {sys.executable} -m fuseq translate --bundle {attending} {' '.join(FAST)} | head -1"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nonsense"], 2, "No such command"),
        (["translate", "--beam", "0", "x"], 2, "--beam"),
        (["translate", "--bundle", "a", "--server", "b:1", "x"], 2, "exclude each other"),
        (["translate", "--bundle", "/nowhere", "x"], 1, "is not a bundle"),
        (["translate", "--server", "127.0.0.1:1", "--timeout", "2", "x"], 1, ""),
        (["serve", "--rows", "0"], 1, "--rows 0"),
        (["serve", "--device", "tpu"], 2, "--device"),
    ],
)
def test_an_error_is_one_line(arguments: list[str], status: int, words: str) -> None:
    out, err = fuseq(*arguments, status=status, FUSEQ_BUNDLE="/nowhere")
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("fuseq: ")
    assert words in line


def test_an_option_that_fails_every_line_is_said_once(attending: Path) -> None:
    _, err = fuseq("translate", "--bundle", str(attending), "--beam", "99", stdin=b"a\nb\nc\n", status=1)
    assert err == "fuseq: beam 99: must be 1 to 32\n"


def test_help_is_quick_and_names_every_command() -> None:
    begin = time.monotonic()
    out, _ = fuseq("--help")
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert time.monotonic() - begin < 20
    assert fuseq("--version")[0].startswith("fuseq")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_is_there_and_documented(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    assert command.help


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        (["train", "some.yaml"], "torch", "train"),
        (["export", "some.pt", "-o", "bundle"], "onnxscript", "cpu,train"),
        (["import", "hf", "some", "-o", "bundle"], "torch", "cpu,train"),
        (["translate", "x"], "onnxruntime", "cpu"),
        (["serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"], "onnxruntime", "cpu"),
    ],
)
def test_a_missing_package_names_its_extra(attending: Path, arguments: list[str], missing: str, extra: str) -> None:
    code = f"import sys\nsys.modules[{missing!r}] = None\nimport fuseq.cli\nfuseq.cli.main()"
    environment = {**os.environ, "FUSEQ_BUNDLE": str(attending)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("fuseq: ")
    assert f"pip install 'fuseq[{extra}]'" in line


def test_without_a_bundled_model_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuseq.BUNDLED", "none")
    with pytest.raises(NotFound, match="name a bundle"):
        bundled_model()


def test_demo_shows_sentences_alignment_and_metrics(attending: Path) -> None:
    out, err = fuseq("demo", FUSEQ_BUNDLE=str(attending), COLUMNS="160")
    assert err == ""
    assert "Where is the next train station?" in out
    assert "server stopped" in out
    for line in ('fuseq_requests_total{outcome="ok"} 6.0', "fuseq_tokens_out_total", "fuseq_rows_per_step_count"):
        assert line in out
    port = int(out.split("127.0.0.1:")[1].split(" ")[0])
    with Client(f"127.0.0.1:{port}", attempts=1, timeout=2) as client, pytest.raises(Unavailable):
        client.translate("is it gone?")


def test_a_closed_standard_input_is_one_line() -> None:
    command = [sys.executable, "-m", "fuseq", "translate"]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("fuseq: standard input is closed")
    assert done.stderr.count("\n") == 1


def test_fuseq_alone_shows_its_help() -> None:
    _, err = fuseq(status=2)
    assert err.rstrip("\n") == fuseq("--help")[0].rstrip("\n")


def test_a_full_disk_is_one_line(attending: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fuseq", "translate", "--bundle", str(attending), "rain"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "fuseq: No space left on device\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_an_argument_that_is_no_text_fails_alone(attending: Path, as_json: bool) -> None:
    command = [sys.executable, "-m", "fuseq", "translate", "--bundle", str(attending), *FAST]
    arguments: list[str | bytes] = [*command, *(["--json"] if as_json else []), b"\xff", "rain"]
    done = subprocess.run(arguments, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == b"fuseq: line 1: not valid UTF-8\n"
    lines = done.stdout.decode().split("\n")
    assert len(lines) == 3
    assert (json.loads(lines[0])["error"] if as_json else lines[0]) == ("not valid UTF-8" if as_json else "")


def test_a_server_that_is_not_there_is_named_with_the_remedy() -> None:
    _, err = fuseq("translate", "--server", "localhost", "rain", status=2)
    assert err.startswith("fuseq: --server localhost: must be HOST:PORT")
    _, err = fuseq("translate", "--server", "127.0.0.1:1", "rain", status=1)
    assert err.startswith("fuseq: no answer from 127.0.0.1:1; does `fuseq serve` run there?")
    assert err.count("\n") == 1
