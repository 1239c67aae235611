"""From a PyTorch model to one ONNX graph per stage, with every dynamic axis still symbolic.

Stages: `encode` runs once a source, `step` once a position, `align` once a finished row that asked for alignments.
Their inputs and outputs follow from the model's StateSpec alone; nothing here knows an architecture.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from onnxscript.optimizer import fold_constants
from onnxscript.version_converter import convert_version
from torch import Tensor, nn

from export.errors import ExportError
from export.nodes import operators
from export.translations import TRANSLATIONS
from serving.core.state_spec import ROW, SOURCE, TIME, Role, StateSpec, StateTensor
from training.models.base import Model, Sizes

TRANSLATED_OPSET = 23  # what torch and onnxscript write
OPSET = 24  # first with Attention by per-row lengths
IR_VERSION = 10
LARGEST_TENSOR = 2**40
TARGET = "target"
EXAMPLE = {ROW: 3, SOURCE: 5, TIME: 7, TARGET: 6}  # distinct and >= 2, so that nothing is specialised or mistaken


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a stage, its axes named or fixed."""

    name: str
    dtype: str
    axes: tuple[str | int, ...]


@dataclass
class Stage:
    """One stage's graph. `calls` says how often the PyTorch program called each operator, by name."""

    name: str
    model: ir.Model
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    calls: dict[str, int]

    @property
    def graph(self) -> ir.Graph:
        """The main graph."""
        return self.model.graph


class _Encode(nn.Module):
    """`initial(encode(...))`, flattened in the order of the specification."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.names = [tensor.name for tensor in model.state_spec().of(Role.MEMORY, Role.RECURRENT)]

    def forward(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        state = self.model.initial(self.model.encode(source, lengths))
        return tuple(state[name].clone() for name in self.names)


class _Step(nn.Module):
    """`step` with the state flattened; returns logits and what the step replaces."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        spec = model.state_spec()
        self.names = [tensor.name for tensor in spec]
        self.updated = [tensor.name for tensor in spec.of(Role.RECURRENT, Role.CACHE)]

    def forward(self, tokens: Tensor, positions: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        logits, updated = self.model.step(tokens, positions, dict(zip(self.names, state, strict=True)))
        return (logits, *(updated[name] for name in self.updated))


class _Align(nn.Module):
    """`align`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        return self.model.align(source, lengths, target)


_Plan = tuple[str, nn.Module, tuple[Port, ...], tuple[Port, ...], tuple[Tensor, ...]]
_SOURCE = (Port("source", "int64", (ROW, SOURCE)), Port("lengths", "int32", (ROW,)))


def build_stages(model: Model, on_stage: Callable[[], object] = lambda: None) -> dict[str, Stage]:
    """Every stage that the model has, translated and checked; `on_stage` is called after each.

    Raises:
        ExportError: an operator has no translation, an axis was frozen, or a loop or dropout is left.
    """
    stages: dict[str, Stage] = {}
    for name, module, inputs, outputs, example in _plans(model):
        stages[name] = _build(name, module, model.sizes, inputs, outputs, example)
        on_stage()
    return stages


def trained_tables(model: Model) -> frozenset[str]:
    """Names, as the graphs have them, of everything that training changes."""
    return frozenset(f"model.{name}" for name, _ in model.named_parameters(remove_duplicate=False))


def _plans(model: Model) -> Iterator[_Plan]:
    """What to trace: for each stage its module, ports and example inputs."""
    spec = model.state_spec()
    state = tuple(map(_state_port, spec))
    replaced = tuple(_state_port(tensor, "next.") for tensor in spec.of(Role.RECURRENT, Role.CACHE))
    begun = tuple(_state_port(tensor) for tensor in spec.of(Role.MEMORY, Role.RECURRENT))
    fed = (Port("tokens", "int64", (ROW,)), Port("positions", "int32", (ROW,)))
    logits = Port("logits", "float32", (ROW, model.sizes.target_vocabulary))
    yield "encode", _Encode(model), _SOURCE, begun, _example_sources(model)
    yield "step", _Step(model), (*fed, *state), (logits, *replaced), _example_step(model, spec)
    if model.has_alignment:
        aligned = Port("alignment", "float32", (ROW, TARGET, SOURCE))
        target = torch.randint(0, model.sizes.target_vocabulary, (EXAMPLE[ROW], EXAMPLE[TARGET]), generator=_seeded())
        inputs = (*_SOURCE, Port("target", "int64", (ROW, TARGET)))
        yield "align", _Align(model), inputs, (aligned,), (*_example_sources(model), target)


def _state_port(tensor: StateTensor, prefix: str = "") -> Port:
    return Port(prefix + tensor.name, tensor.dtype, tensor.axes)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _example_sources(model: Model) -> tuple[Tensor, Tensor]:
    shape = (EXAMPLE[ROW], EXAMPLE[SOURCE])
    source = torch.randint(0, model.sizes.source_vocabulary, shape, generator=_seeded())
    return source, torch.tensor([5, 3, 2], dtype=torch.int32)


def _example_step(model: Model, spec: StateSpec) -> tuple[Tensor, ...]:
    state = model.initial(model.encode(*_example_sources(model)))
    state |= model.empty_caches(EXAMPLE[ROW], EXAMPLE[TIME])
    tokens = torch.randint(0, model.sizes.target_vocabulary, (EXAMPLE[ROW],), generator=_seeded())
    return tokens, torch.tensor([0, 2, 1], dtype=torch.int32), *(state[tensor.name] for tensor in spec)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of things that are meant to be (unused outputs, missing torchvision)."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _dimensions(sizes: Sizes) -> dict[str, Any]:
    """The symbolic axes and how far they may reach."""
    limits = {ROW: None, SOURCE: sizes.source_limit, TIME: sizes.target_limit, TARGET: sizes.target_limit}
    return {axis: torch.export.Dim(axis, max=limit) for axis, limit in limits.items()}


def _build(
    name: str,
    module: nn.Module,
    sizes: Sizes,
    inputs: tuple[Port, ...],
    outputs: tuple[Port, ...],
    example: tuple[Tensor, ...],
) -> Stage:
    """Trace, translate, name and check one stage."""
    module.eval()
    dims = _dimensions(sizes)
    shapes: tuple[Any, ...] = tuple(
        {i: dims[axis] for i, axis in enumerate(p.axes) if isinstance(axis, str)} for p in inputs
    )
    if name == "step":
        shapes = (*shapes[:2], shapes[2:])  # the state comes as *args
    try:
        with _quiet(), torch.no_grad():
            program = torch.export.export(module, example, dynamic_shapes=shapes, strict=False)
            written = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=TRANSLATED_OPSET,
                custom_translation_table=TRANSLATIONS,
                input_names=[port.name for port in inputs],
                output_names=[port.name for port in outputs],
                verbose=False,
                optimize=True,
            )
    except Exception as error:
        raise ExportError(f"stage {name}: torch cannot export it: {_first_line(error)}") from error
    assert written is not None
    stage = Stage(name, written.model, inputs, outputs, _distinct_calls(program))
    _check_axes(stage)
    _tidy(stage)
    _check_operators(stage)
    return stage


def _first_line(error: BaseException) -> str:
    """The most telling line of torch's long export errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]


def _distinct_calls(program: Any) -> dict[str, int]:
    """How often each operator is called on distinct arguments: what a common-subexpression pass leaves of them."""
    numbers: dict[object, int] = {}

    def key(value: Any) -> object:
        if isinstance(value, torch.fx.Node):
            return of_node[value]
        if isinstance(value, list | tuple):
            return tuple(key(item) for item in value)
        return repr(value)

    of_node: dict[torch.fx.Node, int] = {}
    counts: dict[str, int] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            structure: object = (str(node.target), key(node.args), key(sorted(node.kwargs.items())))
        else:
            structure = node.name
        if structure not in numbers and node.op == "call_function":
            counts[str(node.target)] = counts.get(str(node.target), 0) + 1
        of_node[node] = numbers.setdefault(structure, len(numbers))
    return counts


def _check_axes(stage: Stage) -> None:
    """Named axes must have stayed symbolic and fixed ones fixed; then give them their names (cases 25-27)."""
    graph = stage.graph
    for values, ports in ((graph.inputs, stage.inputs), (graph.outputs, stage.outputs)):
        if [value.name for value in values] != [port.name for port in ports]:
            raise ExportError(f"stage {stage.name}: has {[v.name for v in values]}, not {[p.name for p in ports]}")
        for value, port in zip(values, ports, strict=True):
            shape = list(value.shape or ())
            if len(shape) != len(port.axes):
                raise ExportError(f"stage {stage.name}: {port.name} has axes {shape}, not {port.axes}")
            for size, axis in zip(shape, port.axes, strict=True):
                frozen = isinstance(axis, str) and isinstance(size, int)
                if frozen or (isinstance(axis, int) and size != axis):
                    raise ExportError(
                        f"stage {stage.name}: axis {axis!r} of {port.name} was frozen at {size}; "
                        "the model must not branch on sizes or read them as Python numbers"
                    )
            value.shape = ir.Shape(port.axes)
            value.dtype = ir.DataType.from_numpy(np.dtype(port.dtype))


def _tidy(stage: Stage) -> None:
    """Remove traces of the machine that exported, and repeated computations."""
    model = stage.model
    fold_constants(model, input_size_limit=LARGEST_TENSOR, output_size_limit=LARGEST_TENSOR)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    for value in stage.graph.initializers.values():  # plain contiguous arrays, whatever torch made of them
        assert value.const_value is not None
        value.const_value = ir.tensor(np.array(value.const_value.numpy(), order="C"), name=value.name)
    for run in (
        common.ClearMetadataAndDocStringPass(),
        common.DeduplicateHashedInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
    ):
        run(model)
    model.metadata_props.clear()
    for value in (*stage.graph.inputs, *stage.graph.outputs, *stage.graph.initializers.values()):
        value.metadata_props.clear()
    if model.opset_imports.get("", 0) < OPSET:
        convert_version(model, target_version=OPSET)
    model.opset_imports[""] = OPSET
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "fuseq", ""
    stage.graph.name = stage.name


def _check_operators(stage: Stage) -> None:
    found = operators(stage.graph)
    if "Dropout" in found:  # case 33
        raise ExportError(f"stage {stage.name}: dropout is active; call eval() and do not use F.dropout(training=True)")
    # A loop pays the runtime's overhead at every turn; only alignments, asked for seldom, may have one.
    loops = [kind for kind in ("Loop", "Scan", "If") if kind in found]
    if loops and stage.name != "align":
        raise ExportError(f"stage {stage.name}: holds {', '.join(loops)}; use training.ops.lstm or attention operators")
