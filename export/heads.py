"""What the step graph does behind the logits, so that only a few ids and scores per row come back.

log p(i) = log softmax(logits)_i of the k likeliest tokens, best first. Over a large vocabulary the k best are found
in two levels: the k blocks with the largest maxima hold them, so TopK runs over block maxima and then over k blocks.
That is faster than TopK over everything, and LogSoftmax faster and more precise than ReduceLogSumExp. LogSoftmax works
on each row by itself, so scores do not depend on the other rows; a Log over the gathered likelihoods would: its vectors
reach across rows.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from export.graphs import Port, Stage
from export.nodes import Writer
from serving.core.state_spec import ROW

SMALLEST_VOCABULARY = 1024  # below, one TopK is as fast
BLOCKS = (32, 256)  # smallest and largest block


def add_search_head(stage: Stage) -> None:
    """Replace the output `logits` by `top_tokens` and `top_scores`, with `k` as a new input."""
    graph = stage.graph
    logits, vocabulary = graph.outputs[0], stage.outputs[0].axes[1]
    assert isinstance(vocabulary, int)
    k = ir.Value(name="k", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.insert(2, k)
    write = Writer(graph, prefix="search")
    block = block_size(vocabulary)
    if block is None:
        tokens = write.many("TopK", logits, k, outputs=2)[1]
    else:
        tokens = _best_in_blocks(write, logits, k, vocabulary, block)
    scores = write("GatherElements", write("LogSoftmax", logits, axis=-1), tokens, axis=1)  # (row, k)
    for name, value, dtype in (("top_scores", scores, "float32"), ("top_tokens", tokens, "int64")):
        value.name, value.dtype = name, ir.DataType.from_numpy(np.dtype(dtype))
        value.shape = ir.Shape([ROW, "k"])
    graph.outputs[0:1] = [tokens, scores]
    stage.inputs = (*stage.inputs[:2], Port("k", "int64", (1,)), *stage.inputs[2:])
    found = (Port("top_tokens", "int64", (ROW, "k")), Port("top_scores", "float32", (ROW, "k")))
    stage.outputs = (*found, *stage.outputs[1:])


def block_size(vocabulary: int) -> int | None:
    """The divisor of the vocabulary nearest to its square root within `BLOCKS`, None where blocks do not pay."""
    divisors = [size for size in range(BLOCKS[0], BLOCKS[1] + 1) if vocabulary % size == 0]
    if vocabulary < SMALLEST_VOCABULARY or not divisors:
        return None
    return min(divisors, key=lambda size: abs(size - vocabulary**0.5))


def _best_in_blocks(write: Writer, logits: ir.Value, k: ir.Value, vocabulary: int, block: int) -> ir.Value:
    blocks = vocabulary // block
    ids = np.arange(vocabulary, dtype=np.int64).reshape(blocks, block)
    flat = write.constant([0, -1])
    split = write("Reshape", logits, write.constant([0, blocks, block]))  # (row, blocks, block)
    largest = write("ReduceMax", split, write.constant([-1]), keepdims=0)  # (row, blocks)
    wanted = write("Min", k, write.constant([blocks]))  # (1,)
    chosen = write.many("TopK", largest, wanted, outputs=2)[1]  # (row, k)
    index = write("Unsqueeze", chosen, write.constant([2]))
    candidates = write("Reshape", write("GatherND", split, index, batch_dims=1), flat)  # (row, k * block)
    best = write.many("TopK", candidates, k, outputs=2)[1]  # (row, k)
    candidate_ids = write("Reshape", write("Gather", write.constant(ids, "ids"), chosen), flat)  # (row, k * block)
    return write("GatherElements", candidate_ids, best, axis=1)  # (row, k)
