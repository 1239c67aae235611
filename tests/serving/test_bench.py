"""`fuseq bench`: what its figures are made of."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from serving.bench import Work, bench, measure, random_texts, read_texts
from serving.core.codecs import open_codec
from serving.core.errors import ConfigError, InvalidInput
from serving.core.manifest import open_bundle
from tests.serving.engine.tiny import write_bundle
from tests.serving.rpc.harness import running

BUNDLED = Path(__file__).parents[2] / "fuseq" / "models" / "en-de"


def submitter(calls: list[dict[str, Any]], tokens: int = 3, error: Exception | None = None) -> Any:
    """Answers every text with `tokens` tokens at once and notes what was asked."""

    def submit(text: str, **options: Any) -> Future[Any]:
        calls.append({"text": text, **options})
        future: Future[Any] = Future()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(SimpleNamespace(tokens=("x",) * tokens))
        return future

    return submit


def test_figures_are_of_the_counted_batches_only() -> None:
    calls: list[dict[str, Any]] = []
    works = [Work("one two"), Work("one two three four", 7)]
    row = measure(submitter(calls), works, 4, 2, 0.0)
    assert row.batches == 3
    assert len(calls) == 4 * (3 + 1)  # one batch of warm-up
    assert row.tokens_per_s / row.sentences_per_s == pytest.approx(3)
    assert row.words_per_s / row.sentences_per_s == pytest.approx(3)  # of two texts with 2 and 4 words
    assert row.p50_ms <= row.p95_ms
    assert row.rss_mib is not None
    assert row.rss_mib > 10
    assert [call.get("forced_length") for call in calls[:4]] == [None, 7, None, 7]
    assert all(call["beam"] == 2 for call in calls)


def test_a_text_that_fails_ends_the_measurement() -> None:
    with pytest.raises(InvalidInput, match="too long"):
        measure(submitter([], error=InvalidInput("too long")), [Work("x")], 1, 1, 0.0)


def test_random_texts_have_the_length_that_is_forced() -> None:
    works = random_texts(BUNDLED)
    bundle = open_bundle(BUNDLED)
    codec = open_codec(bundle, bundle.manifest.source_codec)
    assert works == random_texts(BUNDLED)
    assert all(len(codec.encode(work.text)) == work.forced_length for work in works)
    assert len({work.forced_length for work in works}) > 10


def test_texts_without_a_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("\n  \n", encoding="utf-8")
    with pytest.raises(ConfigError, match="it has no text"):
        read_texts(file)
    with pytest.raises(ConfigError, match=r"missing\.txt"):
        read_texts(tmp_path / "missing.txt")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(bench, list(arguments), catch_exceptions=False, standalone_mode=False)


def test_command_in_process_and_on_a_server(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny", "attending").path
    texts = tmp_path / "texts.txt"
    texts.write_text("ab ba\nab\n", encoding="utf-8")
    common = ["--input", str(texts), "--batch", "2", "--seconds", "0", "--json"]
    alone = run(str(bundle), *common, "--price-per-hour", "2")
    row = json.loads(alone.output)
    assert (row["batch"], row["beam"], row["texts"]) == (2, 1, "texts.txt")
    assert row["words_per_price"] == pytest.approx(row["words_per_s"] * 3600 / 2, rel=1e-3)
    with running(bundle) as server:
        served = json.loads(run(str(bundle), *common, "--server", server.address).output)
        assert server.snapshot().ok == 2 * (3 + 1)
    assert served["rss_mib"] is None
    assert served["sentences_per_s"] > 0


def test_precision_is_the_servers_own() -> None:
    with pytest.raises(click.UsageError, match="belongs to the server"):
        run("--server", "localhost:1", "--precision", "int8")
