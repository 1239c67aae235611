"""The trained weights of our Transformer, read back out of a bundle's graphs.

A fresh clone holds the bundled model in int8 and nothing else. What its codes stand for are its weights: every engine
gets those, and ours in fp32 too, so that all of them compute the same function.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from serving.core.errors import BundleError
from serving.core.manifest import Bundle

if TYPE_CHECKING:
    from training.models.transformer import Transformer

Array = NDArray[np.float32]
PREFIX = "model."
SCALED = " (scaled)"  # marks a table that holds the embeddings' factor
CENTRE = 128  # MatMulNBits and GatherBlockQuantized: what codes without a zero point are relative to


def model_of(bundle: Bundle, precision: str | None = None) -> Transformer:
    """The bundle's Transformer as a model of PyTorch, with the weights of a precision.

    Raises:
        BundleError: it is another model, or its graphs hold the weights in a way that is not known here.
    """
    import torch

    from training.models.base import Sizes
    from training.models.transformer import Config, Transformer

    manifest = bundle.manifest
    if manifest.architecture != "transformer":
        raise BundleError(f"bundle {manifest.name!r} is no transformer; its weights cannot be given to other engines")
    sizes = Sizes(
        manifest.source_codec.size,
        manifest.target_codec.size,
        manifest.limits.source,
        manifest.limits.target,
        manifest.special_ids(),
        manifest.source_codec == manifest.target_codec,
    )
    config = Config(**manifest.architecture_config)
    model = Transformer(config, sizes).eval()
    found = recover(bundle, precision)
    for name in [name for name in found if name.endswith(SCALED)]:
        found[name.removesuffix(SCALED)] = found.pop(name) / np.float32(model.scale)
    if config.tied:
        table = found.get("target_embedding.weight")
        if table is not None:
            found |= {f"{n}.weight": table for n in ("target_embedding", "source_embedding", "projection")}
    state = {name: torch.from_numpy(np.array(array)) for name, array in found.items()}
    missing, _ = model.load_state_dict({k: v for k, v in state.items() if k in model.state_dict()}, strict=False)
    if missing:
        raise BundleError(f"bundle {manifest.name!r}: no weights found for {missing[0]}; name the training by --run")
    return model


def recover(bundle: Bundle, precision: str | None = None) -> dict[str, Array]:
    """Weights by their name in the model, from the encode and step graphs of a precision, the default for None."""
    graphs = bundle.graphs(precision)
    found: dict[str, Array] = {}
    for stage in ("encode", "step"):
        found |= _weights_of(bundle.file(graphs.graphs[stage]))
    return found


def _weights_of(path: Path) -> dict[str, Array]:
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    found = {
        name.removeprefix(PREFIX): array.astype(np.float32)
        for name, array in constants.items()
        if name.startswith(PREFIX) and array.dtype == np.float32
    }
    plain = {node.output[0]: node for node in graph.node if node.op_type in PRODUCTS and node.input[1] in constants}
    for node in graph.node:
        for bias in (name for name in node.input if name.startswith(PREFIX) and name.endswith(".bias")):
            product = node if node.op_type in PRODUCTS else _product_behind(node, bias, producers)
            if product is not None:
                name = bias.removeprefix(PREFIX).removesuffix("bias") + "weight"
                found[name] = PRODUCTS[product.op_type](product, constants)
                plain.pop(product.output[0], None)
        if node.op_type in ("GatherBlockQuantized", "Gather") and (table := _table(node, constants)) is not None:
            scaled = not any(user.op_type == "Mul" and node.output[0] in user.input for user in graph.node)
            found[TABLES[node.input[1]] + SCALED * scaled] = table
    if len(plain) == 1:  # the projection to words has no bias, unless the model was imported
        [product] = plain.values()
        found["projection.weight"] = PRODUCTS[product.op_type](product, constants)
    return found


def _product_behind(node: Any, bias: str, producers: dict[str, Any]) -> Any:
    """The matrix product that an Add joins with `bias`; None where there is none."""
    if node.op_type != "Add":
        return None
    other = next((name for name in node.input if name != bias), "")
    product = producers.get(other)
    return product if product is not None and product.op_type in PRODUCTS else None


def _blocks(codes: NDArray[np.uint8], scales: Array, outputs: int) -> Array:
    """(outputs, blocks, block) codes and their scales as a matrix (outputs, inputs)."""
    scales = scales.reshape(outputs, -1, 1)
    values = (codes.reshape(outputs, scales.shape[1], -1).astype(np.float32) - CENTRE) * scales
    return np.asarray(values.reshape(outputs, -1), np.float32)


def _nbits(node: Any, constants: dict[str, Any]) -> Array:
    codes, scales = constants[node.input[1]], constants[node.input[2]]
    return _blocks(codes, scales, len(codes))


def _integer(node: Any, constants: dict[str, Any]) -> Array:
    """MatMulIntegerToFloat: B (inputs, outputs), its scales and zero points for each output or for all."""
    codes, scale = constants[node.input[1]], constants[node.input[3]]
    zero = constants[node.input[5]] if len(node.input) > 5 and node.input[5] else np.zeros(1, codes.dtype)
    return np.asarray(((codes.astype(np.float32) - zero.astype(np.float32)) * scale).T, np.float32)


def _matmul(node: Any, constants: dict[str, Any]) -> Array:
    return np.asarray(constants[node.input[1]].T, np.float32)


def _gemm(node: Any, constants: dict[str, Any]) -> Array:
    turned = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    weight = constants[node.input[1]]
    return np.asarray(weight if turned else weight.T, np.float32)


PRODUCTS = {"MatMulNBits": _nbits, "MatMulIntegerToFloat": _integer, "MatMul": _matmul, "Gemm": _gemm}


TABLES = {"source": "source_embedding.weight", "tokens": "target_embedding.weight"}  # by the graph's input


def _table(node: Any, constants: dict[str, Any]) -> Array | None:
    """An embedding table that a node reads rows of; None where it is another table."""
    table = constants.get(node.input[0])
    if node.input[1] not in TABLES or table is None:
        return None
    if node.op_type == "Gather":
        return np.asarray(table, np.float32)
    return _blocks(table, constants[node.input[2]], len(table))
