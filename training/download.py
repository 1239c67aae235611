"""Downloads: a published file to disk, whole or not at all."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from serving.core.errors import Unavailable

BLOCK = 1 << 16
TIMEOUT_SECONDS = 30.0
# Some publishers turn away the default "Python-urllib".
HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; fuseq)"}

Progress = Callable[[int, int | None], None]
"""Called with the bytes so far and, where the publisher says so, the bytes in all."""


def download(url: str, path: Path, progress: Progress = lambda done, total: None) -> None:
    """Fetch `url` into `path`; until all of it has come it lies beside it under another name.

    Raises:
        Unavailable: it cannot be fetched, or ended early.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        request = urllib.request.Request(url, headers=HEADERS)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer, unfinished.open("wb") as file:
            total = int(answer.headers["Content-Length"]) if answer.headers["Content-Length"] else None
            done = 0
            while block := answer.read(BLOCK):
                file.write(block)
                done += len(block)
                progress(done, total)
        if total is not None and done != total:
            raise Unavailable(f"{url} ended after {done} of {total} bytes; try again")
        os.replace(unfinished, path)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(
            f"cannot fetch {url}: {reason}; fetch it another way and pass its folder with --from DIR"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
