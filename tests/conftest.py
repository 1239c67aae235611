"""Flags and markers of the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    parser.addoption(
        "--corpora", type=Path, default=None, metavar="DIR", help="run the tests that read real corpora, from DIR"
    )
    parser.addoption(
        "--bundle", type=Path, action="append", default=[], metavar="DIR", help="test this trained bundle, too"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
        if "corpora" in item.keywords and config.getoption("--corpora") is None:
            item.add_marker(pytest.mark.skip(reason="reads real corpora; run with --corpora DIR"))


@pytest.fixture(scope="session")
def corpora(request: pytest.FixtureRequest) -> Path:
    """The folder of real corpora that --corpora names."""
    folder = request.config.getoption("--corpora")
    assert isinstance(folder, Path)
    if not folder.is_dir():
        pytest.fail(f"--corpora {folder} is not a folder")
    return folder
