"""`fuseq data`, with a real publisher on this host in place of the far one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from serving.core.errors import ConfigError, FuseqError, InvalidInput, NotFound, Unavailable
from tests.support.archives import zipped
from training.data_command import data
from training.datasets import RECIPES
from training.download import download

TABLE = "".join(f"Sentence {i}.\tSatz {i}.\n" for i in range(30)).encode() + b"OK.\tOK.\n"
SMALL = ["--dev", "4", "--test", "6"]


class Publisher(SimpleHTTPRequestHandler):
    """Serves a folder; `/short/` promises more than it sends, and only clients that name themselves are served."""

    def do_GET(self) -> None:
        if self.headers["User-Agent"].startswith("Python-urllib"):
            self.send_error(406)
        elif self.path.startswith("/short/"):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"only this")
        else:
            super().do_GET()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "www").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Publisher, directory=str(tmp_path / "www")))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def publish_at(monkeypatch: pytest.MonkeyPatch, url: str, name: str = "tatoeba-en-de") -> None:
    recipe = RECIPES[name]
    monkeypatch.setitem(RECIPES, name, replace(recipe, files=(replace(recipe.files[0], url=url),)))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(data, [str(argument) for argument in arguments])


def error_of(kind: type[FuseqError], *arguments: object) -> str:
    result = run(*arguments)
    assert type(result.exception) is kind
    message = str(result.exception)
    assert "\n" not in message
    return message


def test_from_a_folder(tmp_path: Path) -> None:
    zipped(tmp_path / "deu-eng.zip", {"deu.txt": TABLE})
    result = run("tatoeba-en-de", "--from", tmp_path, "--to", tmp_path / "out", *SMALL)
    assert result.exception is None, result.exception
    record = json.loads((tmp_path / "out" / "split.json").read_text())
    assert record["parts"]["train"]["pairs"] == 20
    assert "read 31 pairs, kept 30; dropped: 1 copy of the source" in result.stdout
    assert record["sha256"] in result.stdout
    assert "CC BY 2.0 FR. Credit: www.manythings.org/anki and tatoeba.org" in result.stdout
    # A second split of another seed does not replace it unasked, but does when asked.
    again = ("tatoeba-en-de", "--from", tmp_path, "--to", tmp_path / "out", *SMALL, "--seed", 5)
    assert "say --replace" in error_of(InvalidInput, *again)
    assert run(*again, "--replace").exception is None
    assert json.loads((tmp_path / "out" / "split.json").read_text())["seed"] == 5


def test_fetched_once_from_where_it_is_published(
    tmp_path: Path, publisher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = zipped(tmp_path / "www" / "deu-eng.zip", {"deu.txt": TABLE})
    publish_at(monkeypatch, f"{publisher}/deu-eng.zip")
    assert run("tatoeba-en-de", "--to", tmp_path / "out", *SMALL).exception is None
    assert (tmp_path / "out" / "published" / "deu-eng.zip").read_bytes() == archive.read_bytes()
    archive.unlink()
    assert run("tatoeba-en-de", "--to", tmp_path / "out", *SMALL).exception is None


def test_a_file_that_cannot_be_fetched_is_one_line_with_a_remedy(
    tmp_path: Path, publisher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_at(monkeypatch, f"{publisher}/deu-eng.zip")
    message = error_of(Unavailable, "tatoeba-en-de", "--to", tmp_path / "out")
    assert message.startswith(f"cannot fetch {publisher}/deu-eng.zip: ")
    assert message.endswith("pass its folder with --from DIR")
    assert not (tmp_path / "out" / "published" / "deu-eng.zip").exists()


def test_a_page_instead_of_the_file_is_not_kept(
    tmp_path: Path, publisher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "www" / "deu-eng.zip").write_text("<html>We have moved.</html>")
    publish_at(monkeypatch, f"{publisher}/deu-eng.zip")
    assert "is not the published file" in error_of(Unavailable, "tatoeba-en-de", "--to", tmp_path / "out")
    assert list((tmp_path / "out" / "published").iterdir()) == []


def test_a_download_that_ends_early_leaves_nothing(tmp_path: Path, publisher: str) -> None:
    with pytest.raises(Unavailable, match=r"/short/a\.zip"):
        download(f"{publisher}/short/a.zip", tmp_path / "new" / "a.zip")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_download_reports_its_progress(tmp_path: Path, publisher: str) -> None:
    content = bytes(range(256)) * 1024
    (tmp_path / "www" / "a.bin").write_bytes(content)
    seen: list[tuple[int, int | None]] = []
    download(f"{publisher}/a.bin", tmp_path / "a.bin", lambda done, total: seen.append((done, total)))
    assert (tmp_path / "a.bin").read_bytes() == content
    assert seen[-1] == (len(content), len(content))
    assert len(seen) >= 4


def test_no_host_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_at(monkeypatch, "http://nowhere.invalid/deu-eng.zip")
    assert "cannot fetch http://nowhere.invalid/deu-eng.zip" in error_of(Unavailable, "tatoeba-en-de", "--to", tmp_path)


def test_own_pairs(tmp_path: Path) -> None:
    (tmp_path / "mine.tsv").write_bytes(TABLE)
    place = ("own", "--from", tmp_path / "mine.tsv", "--to", tmp_path / "out", *SMALL)
    assert "need both --from" in error_of(ConfigError, *place)
    for languages in ("en", "en-", "en-en", "en-de-fr", "../x-de"):
        assert "as en-de" in error_of(ConfigError, *place, "--languages", languages)
    result = run(*place, "--languages", "en-de", "--licence", "[b]CC0[/x]")
    assert result.exception is None, result.exception
    assert "licence: [b]CC0[/x]. Credit: nobody named" in result.stdout


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    assert "--seed has no effect on multi30k-en-de" in error_of(
        ConfigError, "multi30k-en-de", "--to", tmp_path, "--seed", "1"
    )
    assert "--licence has no effect on tatoeba-en-de" in error_of(
        ConfigError, "tatoeba-en-de", "--to", tmp_path, "--licence", "CC0"
    )


def test_other_mistakes_are_one_line(tmp_path: Path) -> None:
    assert "the nearest is tatoeba-en-de" in error_of(NotFound, "tatoeba-end", "--to", tmp_path)
    assert "fuseq data NAME --to DIR" in error_of(ConfigError, "tatoeba-en-de")
    assert "published at https://" in error_of(NotFound, "tatoeba-en-de", "--from", tmp_path, "--to", tmp_path)
    zipped(tmp_path / "deu-eng.zip", {"deu.txt": TABLE})
    place = ("tatoeba-en-de", "--from", tmp_path, *SMALL, "--to", tmp_path / "deu-eng.zip")
    assert "cannot use " in error_of(ConfigError, *place)
    assert "ask for fewer" in error_of(InvalidInput, "tatoeba-en-de", "--from", tmp_path, "--to", tmp_path / "out")


def test_the_list_names_every_data_set_with_its_licence() -> None:
    result = CliRunner(env={"COLUMNS": "250"}).invoke(data, ["--list"])
    assert result.exit_code == 0
    for recipe in RECIPES.values():
        assert recipe.name in result.stdout
        assert recipe.provenance.licence in result.stdout
