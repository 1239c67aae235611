"""`fuseq serve` with its defaults, as a module that takes its settings as one JSON argument."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Become the server."""
    spec = json.loads(sys.argv[1])
    bundle = Path(spec["weights"]["folder"]) / "bundle"
    command = [sys.executable, "-m", "fuseq", "serve", str(bundle), "--log-level", "warning"]
    command += ["--listen", f"127.0.0.1:{spec['port']}", "--metrics", "127.0.0.1:0"]
    for name in ("workers", "threads", "rows", "queue", "precision"):
        if name in spec:
            command += [f"--{name}", str(spec[name])]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
