"""Plain ONNX Runtime: the plain model exported as it is, default sessions, a loop in Python with numpy.

The way one uses the runtime without an engine: two files, states as inputs and outputs, arg-max over the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.base import Ids, Peer, Search, Setting, Weights, thread_counts

ENCODER, STEP = "encoder.onnx", "step.onnx"


class PlainOnnx(Peer):
    """Setting: precision (int8 is the runtime's own dynamic quantization), threads (0 leaves the default)."""

    name = "ONNX Runtime, plain"
    package = "onnxruntime"
    module = "onnxruntime"
    exact = {"precision": "fp32", "threads": 0}

    def __init__(self, weights: Weights, setting: Setting) -> None:
        super().__init__(weights, setting)
        import onnxruntime

        self._folder = weights.path(f"onnx-{setting['precision']}")
        export(weights)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = setting["threads"]
        paths = (str(self._folder / name) for name in (ENCODER, STEP))
        self._encoder, self._step = (
            onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]) for path in paths
        )
        self._states = [port.name for port in self._step.get_inputs() if port.name.startswith("state")]
        self._memories = [port.name for port in self._step.get_inputs() if port.name.startswith("memory")]

    @classmethod
    def settings(cls, cores: int, batch: int) -> list[Setting]:
        return [{"precision": p, "threads": t} for p in ("fp32", "int8") for t in (0, *thread_counts(cores))]

    def prepare(self, batch: Ids) -> Any:
        """Padded ids and mask (batch, source)."""
        import numpy as np

        longest = max(map(len, batch))
        ids = np.full((len(batch), longest), self.weights.pad, np.int64)
        mask = np.zeros_like(ids)
        for row, source in enumerate(batch):
            ids[row, : len(source)], mask[row, : len(source)] = source, 1
        return ids, mask

    def run(self, prepared: Any, search: Search) -> Any:
        import numpy as np

        if search.beam != 1:
            raise NotImplementedError("only greedy search; a beam search by hand is nobody's plain use")
        source, mask = prepared
        outputs = self._encoder.run(None, {"source": source, "mask": mask})
        found = dict(zip([port.name for port in self._encoder.get_outputs()], outputs, strict=True))
        memory = {name: found[name] for name in self._memories}
        states = [found[name] for name in self._states]
        eos, forced = self.weights.eos, search.forced
        banned = [*([self.weights.pad] if self.weights.form == "marian" else []), *([eos] if forced else [])]
        token = np.full(len(source), self.weights.start, np.int64)
        ended = np.zeros(len(source), bool)
        generated = []
        for _ in range(forced or search.limit):
            feed = {"token": token, **memory, **dict(zip(self._states, states, strict=True))}
            logits, *states = self._step.run(None, feed)
            if banned:
                logits[:, banned] = -np.inf
            token = np.where(ended, eos, logits.argmax(-1))
            generated.append(token)
            ended |= token == eos
            if not forced and ended.all():
                break
        return np.stack(generated, 1).tolist()

    def outputs(self, raw: Any) -> Ids:
        eos = self.weights.eos
        return [row[: row.index(eos)] if eos in row else row for row in raw]

    def files(self) -> list[Path]:
        return [self._folder]


def export(weights: Weights) -> None:
    """Export the plain model and quantize it, once."""
    fp32, int8 = weights.path("onnx-fp32"), weights.path("onnx-int8")
    if (int8 / STEP).is_file():
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    fp32.mkdir(exist_ok=True)
    int8.mkdir(exist_ok=True)
    _export(weights, fp32)
    for name in (ENCODER, STEP):
        quantize_dynamic(fp32 / name, int8 / name, weight_type=QuantType.QInt8)


def _export(weights: Weights, folder: Path) -> None:
    import torch
    from torch import nn

    from benchmarks import plain

    model = plain.load(weights)

    class Encoder(nn.Module):
        """Memory, and the state before the first step."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model  # its weights are this module's, or the exporter takes them for inputs

        def forward(self, source: torch.Tensor, mask: torch.Tensor) -> Any:
            memory = model.encode(source, mask)
            return (*memory, *model.first_state(source.shape[0], memory))

    class Step(nn.Module):
        """One step; the tuples as one list of inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, token: torch.Tensor, *tensors: torch.Tensor) -> Any:
            logits, state = model.step(token, tensors[:memories], tensors[memories:])
            return (logits, *state)

    source = torch.randint(4, weights.vocabulary - 1, (2, 5))
    mask = torch.ones_like(source)
    with torch.no_grad():
        memory = model.encode(source, mask)
        token = torch.full((2,), weights.start)
        _, state = model.step(token, memory, model.first_state(2, memory))
    memories = len(memory)
    memory_names = [f"memory{i}" for i in range(memories)]
    state_names = [f"state{i}" for i in range(len(state))]
    axes = {name: _axes(tensor, "source") for name, tensor in zip(memory_names, memory, strict=True)}
    axes |= {name: _axes(tensor, "time") for name, tensor in zip(state_names, state, strict=True)}
    quiet: dict[str, Any] = {
        "dynamo": False,
        "opset_version": 17,
        "do_constant_folding": True,
    }  # the exporter of most tutorials
    ids = {0: "row", 1: "source"}
    torch.onnx.export(
        Encoder().eval(), (source, mask), str(folder / ENCODER), input_names=["source", "mask"],
        output_names=[*memory_names, *state_names], dynamic_axes={"source": ids, "mask": ids, **axes}, **quiet,
    )  # fmt: skip
    grown = {f"next.{name}": axes[name] for name in state_names}
    axes |= {"token": {0: "row"}, "logits": {0: "row"}, **grown}
    torch.onnx.export(
        Step().eval(), (token, *memory, *state), str(folder / STEP), input_names=["token", *memory_names, *state_names],
        output_names=["logits", *grown], dynamic_axes=axes, **quiet,
    )  # fmt: skip


def _axes(tensor: Any, name: str) -> dict[int, str]:
    """Which axes of a tensor vary: the rows, and of attention's tensors the positions."""
    if tensor.dim() == 4:
        return {0: "row", (3 if tensor.shape[1] == 1 else 2): name}
    return {0: "row", 1: name} if tensor.dim() == 3 or tensor.dtype == _bool() else {0: "row"}


def _bool() -> Any:
    import torch

    return torch.bool
