"""Hugging Face models of a subject: MarianMT as it is, our pre-norm Transformer as M2M100, whose layers are the same.

M2M100 computes sinusoids of another rate than ours, in a table that it does not save; ours is kept beside the
checkpoint and put in its place when the model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.base import Weights

if TYPE_CHECKING:
    import torch

MARIAN, M2M100 = "marian", "m2m100"  # folders of a subject
POSITIONS = "positions.npy"


def quiet() -> Any:
    """The transformers package, which says nothing but errors and asks no network."""
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def folder_of(weights: Weights) -> Path:
    """Where the subject's checkpoint lies."""
    return weights.path(MARIAN if weights.form == "marian" else M2M100)


def load(weights: Weights, dtype: str = "float32") -> Any:
    """The subject as a model of the transformers package, in evaluation mode."""
    import numpy as np
    import torch

    transformers = quiet()
    folder, kind = folder_of(weights), getattr(torch, dtype)
    if weights.form == "marian":
        model = transformers.MarianMTModel.from_pretrained(folder, dtype=kind)
    else:
        model = transformers.M2M100ForConditionalGeneration.from_pretrained(folder, dtype=kind)
        use_positions(model, torch.from_numpy(np.load(folder / POSITIONS)).to(kind))
    return model.eval()


def use_positions(model: Any, table: torch.Tensor) -> None:
    """Give an M2M100 the positions of (positions, size)."""
    for part in (model.model.encoder, model.model.decoder):
        module = part.embed_positions
        first = module.padding_idx + 1  # row of position 0
        weights = module.weights.new_zeros(first + len(table), table.shape[1])
        weights[first:] = table
        module.weights = weights


def save_m2m100(model: Any, folder: Path) -> None:
    """Write `model`, our Transformer with norms in front, as an M2M100 checkpoint.

    Raises:
        ConfigError: it is not such a model.
    """
    import numpy as np
    import torch

    from serving.core.errors import ConfigError

    c, sizes = model.config, model.sizes
    if not (c.pre_norm and c.tied and sizes.shared_vocabulary and c.activation == "relu") or c.output_bias:
        raise ConfigError("only a tied pre-norm Transformer with ReLU can be given to the other engines as M2M100")
    special = sizes.special
    transformers = quiet()
    config = transformers.M2M100Config(
        vocab_size=sizes.target_vocabulary,
        d_model=c.size,
        encoder_layers=c.encoder_layers,
        decoder_layers=c.decoder_layers,
        encoder_attention_heads=c.heads,
        decoder_attention_heads=c.heads,
        encoder_ffn_dim=c.feed_forward,
        decoder_ffn_dim=c.feed_forward,
        max_position_embeddings=len(model.position_table),
        scale_embedding=c.scale_embeddings,
        activation_function="relu",
        pad_token_id=special.pad,
        bos_token_id=special.bos,
        eos_token_id=special.eos,
        decoder_start_token_id=special.bos,
    )
    other = transformers.M2M100ForConditionalGeneration(config)
    missing, unexpected = other.load_state_dict(m2m100_state(model), strict=False)
    left = set(missing) - set(other._tied_weights_keys)
    left -= {key for key in left if key.endswith("embed_tokens.weight")}
    if left or unexpected:
        raise ConfigError(f"the checkpoint lacks {sorted(left)} and has {sorted(unexpected)} too many")
    other.tie_weights()
    other.save_pretrained(folder)
    np.save(folder / POSITIONS, model.position_table.detach().to(torch.float32).numpy())


def m2m100_state(model: Any) -> dict[str, torch.Tensor]:
    """Our weights under M2M100's names, packed projections taken apart."""
    norms = {
        "around_attention.norm": "self_attn_layer_norm",
        "around_cross.norm": "encoder_attn_layer_norm",
        "around_feed_forward.norm": "final_layer_norm",
    }
    names = {**norms, "feed_forward.up": "fc1", "feed_forward.down": "fc2", "cross.query": "encoder_attn.q_proj"}
    names |= {"attention.out": "self_attn.out_proj", "cross.out": "encoder_attn.out_proj"}
    packed = {
        "attention.packed": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "cross.packed": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    }
    ours = model.state_dict()
    named = {"model.shared.weight": ours["target_embedding.weight"]}
    for key, value in ours.items():
        side, _, rest = key.partition(".")
        if side in ("encoder_norm", "decoder_norm"):
            named[f"model.{side[:7]}.layer_norm.{rest}"] = value
        elif side in ("encoder", "decoder"):
            index, _, rest = rest.partition(".")
            module, _, kind = rest.rpartition(".")
            places = packed.get(module) or (names[module],)
            for place, part in zip(places, value.chunk(len(places)), strict=True):
                named[f"model.{side}.layers.{index}.{place}.{kind}"] = part.contiguous()
    return named
