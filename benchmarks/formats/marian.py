"""A MarianMT checkpoint back in Marian's own format, for bergamot: one .npz, and the vocabulary as SentencePiece.

Rows of the embeddings take the order of the SentencePiece model, which is what Marian reads ids from. Marian's
sinusoids fall a little more slowly than those of the checkpoint, and cannot be given: its outputs differ from ours.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.formats import huggingface
from benchmarks.peers.base import Weights

FOLDER = "bergamot"
MODEL, VOCABULARY, PIECES = "model.npz", "vocab.spm", "pieces.json"

# What Marian wants to know of a model beside its sizes.
SETTINGS = {
    "type": "transformer", "version": "v1.9.0", "input-types": [], "skip": False, "right-left": False,
    "layer-normalization": False, "lemma-dim-emb": 0, "tied-embeddings": False, "tied-embeddings-all": True,
    "tied-embeddings-src": False, "enc-type": "bidirectional", "enc-cell": "gru", "enc-cell-depth": 1,
    "dec-cell": "gru", "dec-cell-base-depth": 2, "dec-cell-high-depth": 1, "dim-rnn": 1024,
    "transformer-decoder-autoreg": "self-attention", "transformer-depth-scaling": False,
    "transformer-ffn-depth": 2, "transformer-no-projection": False, "transformer-tied-layers": [],
    "transformer-postprocess": "dan", "transformer-postprocess-emb": "d", "transformer-postprocess-top": "",
    "transformer-preprocess": "", "transformer-train-position-embeddings": False, "transformer-aan-depth": 2,
    "transformer-aan-activation": "swish", "transformer-aan-nogate": False, "transformer-dim-aan": 2048,
    "transformer-guided-alignment-layer": "last", "unlikelihood-loss": False, "ulr": False, "ulr-dim-emb": 0,
    "ulr-trainable-transformation": False, "bert-train-type-embeddings": True, "bert-type-vocab-size": 2,
}  # fmt: skip


def convert(weights: Weights) -> None:
    """Write the subject for bergamot, once.

    Raises:
        ConfigError: the vocabulary's pieces are not those of its SentencePiece model.
    """
    folder = weights.path(FOLDER)
    if (folder / PIECES).is_file():
        return
    import numpy as np
    import sentencepiece

    folder.mkdir(exist_ok=True)
    source = huggingface.folder_of(weights)
    spm = (source / "source.spm").read_bytes()
    (folder / VOCABULARY).write_bytes(spm)
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm)
    known: dict[str, int] = json.loads((source / "vocab.json").read_text(encoding="utf-8"))
    pieces = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
    order = [known.get(piece, known["<unk>"]) for piece in pieces]
    arrays = _arrays(huggingface.load(weights), order)
    np.savez(folder / MODEL, **arrays)
    by_id = {index: piece for piece, index in known.items()}
    (folder / PIECES).write_text(
        json.dumps([by_id[i] for i in range(len(by_id))], ensure_ascii=False), encoding="utf-8"
    )


def _arrays(model: Any, order: list[int]) -> dict[str, Any]:
    """Marian's parameters: matrices (inputs, outputs), vectors (1, size)."""
    import numpy as np

    c = model.config
    settings = {
        **SETTINGS, "dim-emb": c.d_model, "dim-vocabs": [len(order), len(order)], "enc-depth": c.encoder_layers,
        "dec-depth": c.decoder_layers, "transformer-heads": c.encoder_attention_heads,
        "transformer-dim-ffn": c.encoder_ffn_dim, "transformer-ffn-activation": c.activation_function,
    }  # fmt: skip
    text = json.dumps(settings, indent=1) + "\n\0"  # JSON is YAML
    found = {"special:model.yml": np.frombuffer(text.encode(), np.int8)}
    found["Wemb"] = model.model.shared.weight.detach().numpy()[order]
    found["decoder_ff_logit_out_b"] = model.final_logits_bias.numpy()[:, order]
    for side, layers in (("encoder", model.model.encoder.layers), ("decoder", model.model.decoder.layers)):
        for number, layer in enumerate(layers, 1):
            found |= _layer(f"{side}_l{number}", layer)
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def _layer(prefix: str, layer: Any) -> dict[str, Any]:
    blocks = [("self", layer.self_attn, layer.self_attn_layer_norm)]
    if hasattr(layer, "encoder_attn"):
        blocks.append(("context", layer.encoder_attn, layer.encoder_attn_layer_norm))
    found: dict[str, Any] = {}
    for name, attention, norm in blocks:
        for letter, linear in zip("qkvo", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
            found |= _linear(f"{prefix}_{name}_W{letter}", f"{prefix}_{name}_b{letter}", getattr(attention, linear))
        found |= _norm(f"{prefix}_{name}_Wo", norm)
    for number, linear in (("1", layer.fc1), ("2", layer.fc2)):
        found |= _linear(f"{prefix}_ffn_W{number}", f"{prefix}_ffn_b{number}", linear)
    return found | _norm(f"{prefix}_ffn_ffn", layer.final_layer_norm)


def _linear(weight: str, bias: str, linear: Any) -> dict[str, Any]:
    return {weight: linear.weight.detach().numpy().T, bias: linear.bias.detach().numpy()[None]}


def _norm(prefix: str, norm: Any) -> dict[str, Any]:
    return {
        f"{prefix}_ln_scale": norm.weight.detach().numpy()[None],
        f"{prefix}_ln_bias": norm.bias.detach().numpy()[None],
    }
