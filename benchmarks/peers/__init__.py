"""The engines that are measured, one file each. Nothing is imported before it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers.base import Peer

PEERS = {
    "fuseq": "benchmarks.peers.ours:Ours",
    "ctranslate2": "benchmarks.peers.ctranslate2:CTranslate2",
    "huggingface": "benchmarks.peers.huggingface:HuggingFace",
    "bergamot": "benchmarks.peers.bergamot:Bergamot",
    "pytorch-eager": "benchmarks.peers.pytorch:Eager",
    "pytorch-compiled": "benchmarks.peers.pytorch:Compiled",
    "plain-onnx": "benchmarks.peers.plain_onnx:PlainOnnx",
}
OURS = "fuseq"


def find_peer(name: str) -> type[Peer]:
    """The class of a peer; its package is loaded only when one is made."""
    module, _, attribute = PEERS[name].partition(":")
    found: type[Peer] = getattr(importlib.import_module(module), attribute)
    return found
