"""The weights of all graphs of a precision in one file, each content once.

A tensor that several graphs use (the embedding, the decoder's layers in `step` and `align`), or one graph in two
shapes, is stored once: graphs refer to it by file, offset and length (ONNX external data).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

SMALLEST = 1024  # bytes; smaller tensors stay in the graph
ALIGNMENT = 64  # bytes, so that a mapped file is aligned for vector instructions


def save_graphs(folder: Path, graphs: Mapping[str, ir.Model], weights_file: str) -> None:
    """Write each model to `folder/name` and their weights to `folder/weights_file`.

    The models are left pointing at the file. Order and content depend on the graphs only.
    """
    offsets: dict[bytes, int] = {}
    end = 0
    with (folder / weights_file).open("wb") as file:
        for model in graphs.values():
            for value in model.graph.initializers.values():
                tensor = value.const_value
                assert tensor is not None
                assert value.name is not None
                if tensor.nbytes < SMALLEST:
                    continue
                content = tensor.tobytes()
                digest = hashlib.sha256(content).digest()
                if digest not in offsets:
                    offsets[digest] = end
                    file.write(content)
                    end += len(content)
                    padding = -end % ALIGNMENT
                    file.write(b"\0" * padding)
                    end += padding
                value.const_value = ir.ExternalTensor(
                    weights_file,
                    offsets[digest],
                    len(content),
                    tensor.dtype,
                    shape=ir.Shape(tensor.shape.numpy()),
                    name=value.name,
                    base_dir=folder,
                )
    for name, model in graphs.items():
        (folder / name).write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))
