"""Weights read back out of a bundle's graphs are those of the model that it was made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from benchmarks.formats.huggingface import m2m100_state
from benchmarks.weights import model_of, recover
from fuseq import bundled_model
from serving.core.codecs import open_codec
from serving.core.errors import BundleError
from serving.core.manifest import Bundle, open_bundle
from serving.local import LocalTranslator

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def frozen() -> Bundle:
    """A Transformer in fp32 and in int8."""
    return open_bundle(DATA / "frozen-v1")


def test_fp32_weights_give_the_graphs_own_encoding(frozen: Bundle) -> None:
    model = model_of(frozen, "fp32")
    source = np.array([[5, 9, 30, 41, 2], [7, 8, 2, 2, 2]], np.int64)
    lengths = np.array([5, 3], np.int32)
    session = onnxruntime.InferenceSession(str(frozen.file(frozen.graphs("fp32").graphs["encode"])))
    names = [port.name for port in session.get_outputs()]
    graph = dict(zip(names, session.run(names, {"source": source, "lengths": lengths}), strict=True))
    with torch.no_grad():
        memory = model.encode(torch.from_numpy(source), torch.from_numpy(lengths))
    assert "memory_key_0" in names
    for name in names:
        if name.startswith("memory_"):
            np.testing.assert_allclose(graph[name][0], memory[name][0].numpy(), atol=2e-5)


def test_int8_weights_are_within_half_a_code_of_fp32(frozen: Bundle) -> None:
    exact, coded = recover(frozen, "fp32"), recover(frozen, "int8")
    assert set(coded) >= set(exact) - {"position_table"}
    for name, weight in exact.items():
        if weight.ndim == 2 and name.endswith("weight") and name in coded:
            step = np.abs(weight).max() / 127
            assert np.abs(weight - coded[name]).max() <= 0.51 * step, name


def test_a_recurrent_bundle_is_refused() -> None:
    with pytest.raises(BundleError, match="no transformer"):
        model_of(open_bundle(DATA / "frozen-v1-bahdanau"))


def test_every_weight_finds_its_place_in_m2m100(frozen: Bundle) -> None:
    model = model_of(frozen, "fp32")
    state = m2m100_state(model)
    taken = sum(value.numel() for value in state.values())
    assert taken == sum(parameter.numel() for parameter in model.parameters())
    q, k, _ = model.state_dict()["encoder.0.attention.packed.weight"].chunk(3)
    assert torch.equal(state["model.encoder.layers.0.self_attn.k_proj.weight"], k)
    assert torch.equal(state["model.encoder.layers.0.self_attn.q_proj.weight"], q)


def test_the_bundled_model_translates_the_same_in_pytorch() -> None:
    """Whatever the bundle's quantization is, its weights in fp32 say what the bundle says."""
    bundle = open_bundle(bundled_model())
    model, special = model_of(bundle), bundle.manifest.special
    codec = open_codec(bundle, bundle.manifest.source_codec)
    texts = ["I am tired.", "Where is the station?", "She has a dog.", "We live here.", "It is cold today."]
    with LocalTranslator(bundle.path) as translator:
        expected = [translator.submit(text).result().text for text in texts]
    same = 0
    for text, translation in zip(texts, expected, strict=True):
        source = torch.tensor([[*codec.encode(text), special.eos]])
        target = [special.bos]
        with torch.no_grad():
            while target[-1] != special.eos and len(target) < 30:
                logits = model(source, torch.tensor([source.shape[1]], dtype=torch.int32), torch.tensor([target]))
                target.append(int(logits[0, -1].argmax()))
        same += codec.decode(target[1:-1]) == translation
    assert same >= 4  # a close call may fall the other way in int8
