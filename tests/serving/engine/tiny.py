"""Tiny bundles written by hand with onnx.helper: what an export promises the engine, without torch.

`attending` is a decoder with caches and cross keys and values that are read by length and written in place
(com.microsoft GroupQueryAttention); `recurrent` is an LSTM decoder with additive attention over source-axis memory,
and coverage (Tu et al. 2016), so that it has recurrent state along the source too;
`summing` has no attention, no source axis, no lengths and no positions. Weights are random but fixed.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import sentencepiece
from onnx import TensorProto, helper, numpy_helper

from serving.core.manifest import MANIFEST_NAME, Bundle, open_bundle

SIZE, HEADS, LAYERS, HIDDEN = 16, 2, 2, 12
SOURCE_LIMIT, TARGET_LIMIT = 96, 64
POISON = 9  # an id that makes the call fail for every row in it, fed to the encoder or to the step
NAN = 8  # a target id whose embedding is not a number
OPSET, IR = 21, 10
BOS, EOS = 1, 2

Shape = list[str | int]


class Builder:
    """Collects the nodes and weights of one graph."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, onnx.TensorProto] = {}
        self.count = 0

    def op(self, kind: str, *inputs: str, to_name: str = "", **attributes: object) -> str:
        """One node with one output, called `to_name` or something new."""
        self.count += 1
        output = to_name or f"{kind.lower()}_{self.count}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def const(self, value: object, dtype: type = np.int64) -> str:
        self.count += 1
        name = f"const_{self.count}"
        self.weights[name] = numpy_helper.from_array(np.asarray(value, dtype), name)
        return name

    def weight(self, name: str, *shape: int, scale: float = 1.0) -> str:
        if name not in self.weights:
            # Seeded by the name, so that encoder, step and align share what is called the same.
            rng = np.random.default_rng([self.seed, *name.encode()])
            values = rng.normal(0.0, scale, shape).astype(np.float32)
            if name == "target_embedding":
                values[NAN] = np.nan
            self.weights[name] = numpy_helper.from_array(values, name)
        return name

    def linear(self, x: str, name: str, rows: int, columns: int, gain: float = 1.0) -> str:
        return self.op("MatMul", x, self.weight(name, rows, columns, scale=gain * rows**-0.5))

    def refuse_poison(self, ids: str) -> str:
        """`ids`, but an index out of range where one of them is POISON: the whole call fails."""
        bad = self.op("Cast", self.op("Equal", ids, self.const(POISON)), to=TensorProto.INT64)
        zero = self.op("Gather", self.const([0]), self.op("ReduceMax", self.op("Reshape", bad, self.const([-1]))))
        return self.op("Add", ids, zero)

    def model(self, inputs: dict[str, tuple[int, Shape]], outputs: dict[str, tuple[int, Shape]]) -> bytes:
        graph = helper.make_graph(
            self.nodes,
            "tiny",
            [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
            [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()],
            list(self.weights.values()),
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR).SerializeToString()


F, I64, I32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
ENCODE_INPUTS: dict[str, tuple[int, Shape]] = {"source": (I64, ["row", "source"]), "lengths": (I32, ["row"])}
STEP_INPUTS: dict[str, tuple[int, Shape]] = {"tokens": (I64, ["row"]), "positions": (I32, ["row"]), "k": (I64, [1])}
STEP_OUTPUTS: dict[str, tuple[int, Shape]] = {"top_tokens": (I64, ["row", "k"]), "top_scores": (F, ["row", "k"])}


def _encoded(b: Builder, vocabulary: int) -> str:
    """(row, source, SIZE): each position knows its id, its place and the mean of the row; zero in the padding."""
    ids = b.refuse_poison("source")
    x = b.op("Gather", b.weight("source_embedding", vocabulary, SIZE), ids)
    length = b.op("Gather", b.op("Shape", "source"), b.const(1))
    places = b.op("Range", b.const(0), length, b.const(1))  # (source,)
    x = b.op("Add", x, b.op("Gather", b.weight("source_place", SOURCE_LIMIT + 32, SIZE, scale=0.5), places))
    lengths = b.op("Cast", "lengths", to=I64)
    live = b.op("Less", b.op("Unsqueeze", places, b.const([0])), b.op("Unsqueeze", lengths, b.const([1])))
    mask = b.op("Unsqueeze", b.op("Cast", live, to=F), b.const([2]))  # (row, source, 1)
    total = b.op("ReduceSum", b.op("Mul", x, mask), b.const([1]), keepdims=1)  # (row, 1, SIZE)
    count = b.op("ReduceSum", mask, b.const([1]), keepdims=1)  # (row, 1, 1)
    mixed = b.op("Add", x, b.op("Div", total, count))
    return b.op("Mul", b.op("Tanh", b.linear(mixed, "encoder", SIZE, SIZE, gain=1.5)), mask)


def _candidates(b: Builder, hidden: str, size: int, vocabulary: int, end_bias: float) -> None:
    """top_tokens and top_scores from (row, size); the larger `end_bias`, the shorter the outputs."""
    logits = b.linear(hidden, "output", size, vocabulary, gain=2.5)
    bias = np.zeros(vocabulary, np.float32)
    bias[[0, BOS, 3, POISON, NAN]] = -30.0  # the model never says these
    bias[EOS] = end_bias
    scores = b.op("LogSoftmax", b.op("Add", logits, b.const(bias, np.float32)), axis=-1)
    b.nodes.append(helper.make_node("TopK", [scores, "k"], ["top_scores", "top_tokens"], axis=-1, largest=1, sorted=1))


def attending_encode(seed: int, vocabulary: int) -> bytes:
    b = Builder(seed)
    memory = _encoded(b, vocabulary)
    outputs: dict[str, tuple[int, Shape]] = {}
    for i in range(LAYERS):
        for part in ("key", "value"):
            name = f"memory_{part}_{i}"
            split = b.op("Reshape", b.linear(memory, f"cross_{part}_{i}", SIZE, SIZE), b.const([0, 0, HEADS, -1]))
            b.op("Transpose", split, perm=[0, 2, 1, 3], to_name=name)
            outputs[name] = (F, ["row", HEADS, "source", SIZE // HEADS])
    b.op("Identity", "lengths", to_name="source_length")
    return b.model(ENCODE_INPUTS, {**outputs, "source_length": (I32, ["row"])})


def _last_of(b: Builder, memory: str, last: str) -> str:
    """(row, SIZE): the memory at each row's last source position."""
    place = b.op("Cast", b.op("Reshape", last, b.const([-1, 1, 1])), to=I64)
    places = b.op("Expand", place, b.const([1, HEADS, 1]))
    return b.op("Reshape", b.op("GatherND", memory, places, batch_dims=2), b.const([-1, SIZE]))


def _extent(b: Builder, name: str) -> str:
    return b.op("Cast", b.op("Gather", b.op("Shape", name), b.const(2)), to=I32)


def _attention(b: Builder, x: str, i: int, block: str, last: str) -> tuple[str, list[str]]:
    """One attention of layer `i`: (row, SIZE), and the names of the K and V buffers that it writes in place."""
    past = [f"{'self' if block == 'self' else 'memory'}_{part}_{i}" for part in ("key", "value")]
    query = b.linear(x, f"{block}_q_{i}", SIZE, SIZE, gain=2.0)
    if block == "self":
        new = [b.linear(x, f"self_{part}_{i}", SIZE, SIZE) for part in ("k", "v")]
    else:  # what already stands at the last position is written there again
        new = [_last_of(b, name, last) for name in past]
    one_step = [b.op("Unsqueeze", value, b.const([1])) for value in (query, *new)]  # (row, 1, SIZE)
    extent = b.op("Cast", b.op("Gather", b.op("Shape", past[0]), b.const(2)), to=I32)
    out = f"{block}_attended_{i}"
    b.nodes.append(
        helper.make_node(
            "GroupQueryAttention",
            [*one_step, *past, last, extent],
            [out, *(f"next.{name}" for name in past)],
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=HEADS,
        )
    )
    return b.linear(b.op("Squeeze", out, b.const([1])), f"{block}_o_{i}", SIZE, SIZE), past


def attending_step(seed: int, vocabulary: int) -> bytes:
    b = Builder(seed)
    x = b.op("Gather", b.weight("target_embedding", vocabulary, SIZE), b.refuse_poison("tokens"))
    x = b.op("Add", x, b.op("Gather", b.weight("target_place", TARGET_LIMIT, SIZE), "positions"))
    source_last = b.op("Sub", "source_length", b.const(1, np.int32))
    inputs, outputs = dict(STEP_INPUTS), dict(STEP_OUTPUTS)
    for i in range(LAYERS):
        for block, axis, last in (("self", "time", "positions"), ("cross", "source", source_last)):
            attended, names = _attention(b, x, i, block, last)
            for name in names:
                inputs[name] = outputs[f"next.{name}"] = (F, ["row", HEADS, axis, SIZE // HEADS])
            x = b.op("Tanh", b.op("Add", x, attended))  # (row, SIZE)
    _candidates(b, x, SIZE, vocabulary, end_bias=1.0)
    return b.model({**inputs, "source_length": (I32, ["row"])}, outputs)


def attending_align(seed: int, vocabulary: int) -> bytes:
    """Softmax of embedding products: rows sum to 1, and each depends on the target up to its place only."""
    b = Builder(seed)
    memory = _encoded(b, vocabulary)  # (row, source, SIZE)
    query = b.op("Gather", b.weight("target_embedding", vocabulary, SIZE), "target")  # (row, target, SIZE)
    scores = b.op("MatMul", query, b.op("Transpose", memory, perm=[0, 2, 1]))  # (row, target, source)
    b.op("Softmax", scores, axis=-1, to_name="alignment")
    inputs: dict[str, tuple[int, Shape]] = {**ENCODE_INPUTS, "target": (I64, ["row", "target"])}
    return b.model(inputs, {"alignment": (F, ["row", "target", "source"])})


RECURRENT_STATE: dict[str, tuple[int, Shape]] = {
    "memory": (F, ["row", "source", SIZE]),
    "keys": (F, ["row", "source", HIDDEN]),
    "source_length": (I32, ["row"]),
    "hidden": (F, ["row", HIDDEN]),
    "cell": (F, ["row", HIDDEN]),
    "coverage": (F, ["row", "source"]),  # how much each source position was attended to so far
}


def recurrent_encode(seed: int, vocabulary: int) -> bytes:
    b = Builder(seed)
    memory = b.op("Identity", _encoded(b, vocabulary), to_name="memory")
    b.op("MatMul", memory, b.weight("keys_weight", SIZE, HIDDEN, scale=0.4), to_name="keys")
    b.op("Identity", "lengths", to_name="source_length")
    mean = b.op("ReduceMean", memory, b.const([1]), keepdims=0)  # (row, SIZE)
    b.op("Tanh", b.linear(mean, "initial_hidden", SIZE, HIDDEN, gain=3.0), to_name="hidden")
    b.op("Tanh", b.linear(mean, "initial_cell", SIZE, HIDDEN, gain=3.0), to_name="cell")
    size = b.op("Shape", memory)
    b.op("Expand", b.const(0.0, np.float32), b.op("Slice", size, b.const([0]), b.const([2])), to_name="coverage")
    return b.model(ENCODE_INPUTS, dict(RECURRENT_STATE))


def recurrent_step(seed: int, vocabulary: int) -> bytes:
    b = Builder(seed)
    x = b.op("Gather", b.weight("target_embedding", vocabulary, SIZE), b.refuse_poison("tokens"))
    query = b.op("Unsqueeze", b.linear("hidden", "query", HIDDEN, HIDDEN), b.const([1]))
    energy = b.linear(b.op("Tanh", b.op("Add", "keys", query)), "energy", HIDDEN, 1, gain=3.0)  # (row, source, 1)
    attended = b.op("Mul", b.op("Unsqueeze", "coverage", b.const([2])), b.const(-0.7, np.float32))
    energy = b.op("Add", energy, attended)
    length = b.op("Gather", b.op("Shape", "keys"), b.const(1))
    places = b.op("Cast", b.op("Range", b.const(0), length, b.const(1)), to=I32)
    live = b.op("Less", b.op("Unsqueeze", places, b.const([0])), b.op("Unsqueeze", "source_length", b.const([1])))
    masked = b.op("Where", b.op("Unsqueeze", live, b.const([2])), energy, b.const(-3e38, np.float32))
    attention = b.op("Softmax", masked, axis=1)  # (row, source, 1)
    b.op("Add", "coverage", b.op("Squeeze", attention, b.const([2])), to_name="next.coverage")
    weights = b.op("Transpose", attention, perm=[0, 2, 1])  # (row, 1, source)
    context = b.op("Squeeze", b.op("MatMul", weights, "memory"), b.const([1]))  # (row, SIZE)
    joined = b.op("Concat", x, context, "hidden", axis=1)
    gates = b.linear(joined, "gates", 2 * SIZE + HIDDEN, 4 * HIDDEN, gain=2.0)
    b.nodes.append(helper.make_node("Split", [gates], ["i", "f", "g", "o"], axis=1, num_outputs=4))
    kept = b.op("Mul", b.op("Sigmoid", "f"), "cell")
    cell = b.op("Add", kept, b.op("Mul", b.op("Sigmoid", "i"), b.op("Tanh", "g")), to_name="next.cell")
    hidden = b.op("Mul", b.op("Sigmoid", "o"), b.op("Tanh", cell), to_name="next.hidden")
    _candidates(b, b.op("Concat", hidden, context, axis=1), HIDDEN + SIZE, vocabulary, end_bias=4.5)
    replaced = {f"next.{name}": RECURRENT_STATE[name] for name in ("hidden", "cell", "coverage")}
    return b.model({**STEP_INPUTS, **RECURRENT_STATE}, {**STEP_OUTPUTS, **replaced})


SUMMING_STATE: dict[str, tuple[int, Shape]] = {"bag": (F, ["row", SIZE]), "said": (F, ["row", SIZE])}


def summing_encode(seed: int, vocabulary: int) -> bytes:
    b = Builder(seed)
    total = b.op("ReduceSum", _encoded(b, vocabulary), b.const([1]), keepdims=0)  # (row, SIZE)
    lengths = b.op("Unsqueeze", b.op("Cast", "lengths", to=F), b.const([1]))
    b.op("Div", total, lengths, to_name="bag")
    b.op("Mul", "bag", b.const(0.0, np.float32), to_name="said")
    return b.model(ENCODE_INPUTS, dict(SUMMING_STATE))


def summing_step(seed: int, vocabulary: int) -> bytes:
    """Takes no positions: a graph need not use every input that the contract offers."""
    b = Builder(seed)
    x = b.op("Gather", b.weight("target_embedding", vocabulary, SIZE), b.refuse_poison("tokens"))
    said = b.op("Tanh", b.op("Add", b.linear("said", "said_weight", SIZE, SIZE, gain=3.0), x), to_name="next.said")
    _candidates(b, b.op("Concat", "bag", said, axis=1), 2 * SIZE, vocabulary, end_bias=4.0)
    inputs = {name: value for name, value in STEP_INPUTS.items() if name != "positions"}
    return b.model({**inputs, **SUMMING_STATE}, {**STEP_OUTPUTS, "next.said": SUMMING_STATE["said"]})


KINDS: dict[str, dict[str, Callable[[int, int], bytes]]] = {
    "attending": {"encode": attending_encode, "step": attending_step, "align": attending_align},
    "recurrent": {"encode": recurrent_encode, "step": recurrent_step},
    "summing": {"encode": summing_encode, "step": summing_step},
}
SENTENCES = ["the cat sat on the mat", "a dog ran to the park", "we eat bread and soup", "rain falls on the green hill"]


def codec_model(size: int = 300) -> bytes:
    """A SentencePiece model with byte fallback, trained on a handful of sentences."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=written,
        vocab_size=size,
        model_type="unigram",
        byte_fallback=True,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return written.getvalue()


def codec_size() -> int:
    """How many ids `codec_model` has."""
    return int(sentencepiece.SentencePieceProcessor(model_proto=codec_model()).get_piece_size())


def _state(kind: str) -> list[dict[str, object]]:
    if kind != "attending":
        spec = RECURRENT_STATE if kind == "recurrent" else SUMMING_STATE
        replaced = ("hidden", "cell", "coverage", "said")
        return [
            {
                "name": name,
                "dtype": "float32" if dtype == F else "int32",
                "axes": axes,
                "role": "recurrent" if name in replaced else "memory",
            }
            for name, (dtype, axes) in spec.items()
        ]
    tensors: list[dict[str, object]] = []
    for i in range(LAYERS):
        for prefix, axis, role in (("self", "time", "cache"), ("memory", "source", "memory")):
            for part in ("key", "value"):
                axes = ["row", HEADS, axis, SIZE // HEADS]
                tensors.append({"name": f"{prefix}_{part}_{i}", "dtype": "float32", "axes": axes, "role": role})
    return [*tensors, {"name": "source_length", "dtype": "int32", "axes": ["row"], "role": "memory"}]


def write_bundle(folder: Path, kind: str, seed: int = 7) -> Bundle:
    """Write a bundle of `kind` into `folder` and open it."""
    folder.mkdir(parents=True)
    codec = codec_model()
    size = codec_size()
    contents = {"text.model": codec}
    contents |= {f"{stage}.onnx": make(seed, size) for stage, make in KINDS[kind].items()}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    entry = {"kind": "sentencepiece", "file": "text.model", "size": size}
    manifest = {
        "schema_version": 1,
        "name": f"tiny-{kind}",
        "version": "1",
        "architecture": kind,
        "state": _state(kind),
        "source_codec": entry,
        "target_codec": entry,
        "special": {"pad": 0, "bos": BOS, "eos": EOS, "unk": 3},
        "limits": {"source": SOURCE_LIMIT, "target": TARGET_LIMIT},
        "precisions": {"fp32": {"graphs": {stage: f"{stage}.onnx" for stage in KINDS[kind]}}},
        "default_precision": "fp32",
        "tools": {"opset": OPSET, "ir": IR},
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            for name, content in contents.items()
        },
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    return open_bundle(folder)
