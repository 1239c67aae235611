"""Rewrites of exported graphs into fewer, faster operators. One file each; `fuse` runs them in order."""

from __future__ import annotations

from collections.abc import Callable

from export.errors import ExportError
from export.fusions import attention, linear, lookup, memory, packed, shapes
from export.graphs import Stage
from export.nodes import operators

# Operator of the finished graph -> the PyTorch operators it stands for. Each call must have become exactly one node.
FUSED = {
    "Attention": ("aten.scaled_dot_product_attention.default",),
    "GroupQueryAttention": ("fuseq.cached_attention.default", "fuseq.memory_attention.default"),
    "LSTM": ("fuseq.lstm.default", "aten.lstm.input"),
    "GRU": ("fuseq.gru.default", "aten.gru.input"),
    "LayerNormalization": ("aten.layer_norm.default",),
    "Gelu": ("aten.gelu.default",),
}

_PASSES: tuple[tuple[str, Callable[[Stage], int]], ...] = (
    ("attention by length", attention.fuse),
    ("packed projections", packed.fuse),
    ("linear layers", linear.fuse),
    ("table lookups", lookup.fuse),
    ("merged nodes", shapes.fuse),
    ("memory in place", memory.fuse),
)


def fuse(stage: Stage) -> dict[str, int]:
    """Run every fusion on the stage; returns how often each fused operator stands in the graph.

    Raises:
        ExportError: an operator was taken apart, multiplied or lost on the way.
    """
    counts = {name: run(stage) for name, run in _PASSES}
    found = operators(stage.graph)
    for kind, calls in FUSED.items():
        expected = sum(stage.calls.get(call, 0) for call in calls)
        if expected != found.get(kind, 0):
            raise ExportError(
                f"stage {stage.name}: {expected} {kind} expected from the PyTorch program, {found.get(kind, 0)} found; "
                "this version of torch or onnxscript exports it differently"
            )
        if expected:
            counts[kind] = expected
    return {kind: count for kind, count in counts.items() if count}
