"""Archives for tests."""

from __future__ import annotations

import zipfile
from pathlib import Path


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    """Write a zip of these members and return its path."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path
