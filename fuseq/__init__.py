"""fuseq: sequence models trained in PyTorch, exported to ONNX, served over gRPC.

from fuseq import Client

with Client("localhost:50051") as client:
    print(client.translate("Where is the station?").text)
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuseq.client import Client, ModelInfo
    from fuseq.translation import Alignment, Hypothesis, Translation
    from serving.core.errors import FuseqError

__version__ = "0.1.0"
__all__ = ["Alignment", "Client", "FuseqError", "Hypothesis", "ModelInfo", "Translation", "bundled_model"]

BUNDLED = "en-de"


def bundled_model() -> Path:
    """Folder of the English-to-German bundle that is installed with this package.

    Raises:
        serving.core.errors.NotFound: this installation holds no bundle.
    """
    path = Path(__file__).parent / "models" / BUNDLED
    if not (path / "manifest.json").is_file():
        from serving.core.errors import NotFound

        raise NotFound("this installation of fuseq has no bundled model; name a bundle, or install the released wheel")
    return path


_HOMES = {
    "Client": "fuseq.client",
    "ModelInfo": "fuseq.client",
    "FuseqError": "serving.core.errors",
    "Alignment": "fuseq.translation",
    "Hypothesis": "fuseq.translation",
    "Translation": "fuseq.translation",
}


def __getattr__(name: str) -> Any:
    """Load the public names when they are first asked for, so that `import fuseq` costs nothing."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
