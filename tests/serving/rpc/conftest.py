"""Tiny bundles and a server on them that tests which only ask may share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.engine.tiny import write_bundle
from tests.serving.rpc.harness import Running, running


@pytest.fixture(scope="session")
def attending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with attention, caches and alignments."""
    return write_bundle(tmp_path_factory.mktemp("rpc") / "attending", "attending").path


@pytest.fixture(scope="session")
def summing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without attention."""
    return write_bundle(tmp_path_factory.mktemp("rpc") / "summing", "summing").path


@pytest.fixture(scope="session")
def shared(attending: Path, summing: Path) -> Iterator[Running]:
    """A server with both; tests leave it as they find it."""
    with running(attending, summing) as server:
        yield server
