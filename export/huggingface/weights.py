"""A MarianMT model's tensors and those of our Transformer: one table, read in both directions.

Both compute the same: layer normalisation after each sublayer, biases everywhere, sinusoids as sines and then cosines,
a bias for each word of the target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from serving.core.errors import ConfigError
from training.layers import sinusoids
from training.models.base import Sizes
from training.models.transformer import Config, Transformer

SHARED, OUTPUT, OUTPUT_BIAS = "model.shared.weight", "lm_head.weight", "final_logits_bias"
EMBEDDING = "model.{side}.embed_tokens.weight"
POSITIONS = "model.{side}.embed_positions.weight"
SIDES = ("encoder", "decoder")

# In a layer: ours -> theirs, which stand one below the other in it.
_LAYER = {
    "attention.packed": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.out_proj",),
    "around_attention.norm": ("self_attn_layer_norm",),
    "feed_forward.up": ("fc1",),
    "feed_forward.down": ("fc2",),
    "around_feed_forward.norm": ("final_layer_norm",),
}
_DECODER_LAYER = _LAYER | {
    "cross.query": ("encoder_attn.q_proj",),
    "cross.packed": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross.out": ("encoder_attn.out_proj",),
    "around_cross.norm": ("encoder_attn_layer_norm",),
}


def _layers(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Ours and theirs, for every tensor of every layer."""
    plans = (("encoder", config.encoder_layers, _LAYER), ("decoder", config.decoder_layers, _DECODER_LAYER))
    for side, count, layer in plans:
        for index in range(count):
            for ours, theirs in layer.items():
                for kind in ("weight", "bias"):
                    parts = tuple(f"model.{side}.layers.{index}.{one}.{kind}" for one in theirs)
                    yield f"{side}.{index}.{ours}.{kind}", parts


def _tables(shared: bool, tied: bool) -> dict[str, tuple[str, ...]]:
    """Ours and theirs, for embeddings and output projection: the first name that a checkpoint has.

    Of tables that are one, a checkpoint need hold no more than one. Without `tied` (tie_word_embeddings) each stands
    for itself, as `transformers` 5 has it, and `shared` alone was enough for one table before.
    """
    source, target = (EMBEDDING.format(side=side) for side in SIDES)
    names: dict[str, tuple[str, ...]] = {
        "source_embedding.weight": (source,),
        "target_embedding.weight": (target, OUTPUT) if tied else (target,),
        "projection.weight": (target, OUTPUT) if tied else (OUTPUT,),
    }
    if shared and tied:
        return dict.fromkeys(names, (SHARED, target, source, OUTPUT))
    return {ours: (*theirs, SHARED) for ours, theirs in names.items()} if shared else names


class _Source:
    """The tensors of a checkpoint; remembers which were asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], named: str) -> None:
        self.tensors, self.named, self.used = tensors, named, set[str]()

    def take(self, shape: tuple[int, ...], *names: str) -> Tensor:
        """The tensor with the first of these names that is there, in float32."""
        name = next((name for name in names if name in self.tensors), None)
        if name is None:
            raise ConfigError(f"{self.named} has no tensor {names[0]}; it is not the one that config.json describes")
        self.used.add(name)
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{self.named}: {name} is {_shape(tensor)}, but config.json asks for {' x '.join(map(str, shape))}"
            )
        return tensor.float()

    def left_over(self) -> list[str]:
        """Tensors that nobody asked for and that have no other name that somebody asked for."""
        copies = {SHARED, OUTPUT, *(form.format(side=side) for form in (EMBEDDING, POSITIONS) for side in SIDES)}
        return sorted(set(self.tensors) - self.used - copies)


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


@torch.no_grad()
def build_model(config: Config, sizes: Sizes, tensors: Mapping[str, Tensor], named: str) -> Transformer:
    """Our model with a checkpoint's tensors, in evaluation mode.

    Args:
        config: its activation, sizes and whether tables are tied; `positions` must be halves, `output_bias` true.
        sizes: of the vocabularies; `shared_vocabulary` says whether the embeddings are one.
        tensors: of the checkpoint, of any floating-point type.
        named: what the checkpoint is called in errors.

    Raises:
        ConfigError: a tensor is missing, of another shape, or of another architecture.
    """
    model, source = Transformer(config, sizes), _Source(tensors, named)
    ours = dict(model.named_parameters(remove_duplicate=False))
    for name, theirs in _tables(sizes.shared_vocabulary, config.tied).items():
        ours[name].copy_(source.take(tuple(ours[name].shape), *theirs))
    for name, parts in _layers(config):
        rows = ours[name].shape[0] // len(parts)
        shape = (rows, *ours[name].shape[1:])
        ours[name].copy_(torch.cat([source.take(shape, part) for part in parts]))
    if OUTPUT_BIAS in tensors:
        model.projection.bias.copy_(source.take((1, sizes.target_vocabulary), OUTPUT_BIAS)[0])
    _check_positions(config, tensors, named)
    if left := source.left_over():
        raise ConfigError(f"{named} has tensors that a MarianMT model does not use: {', '.join(left[:3])} ...")
    return model.eval()


def _check_positions(config: Config, tensors: Mapping[str, Tensor], named: str) -> None:
    """Older checkpoints store their positions, which must be the ones that are computed here."""
    for side in SIDES:
        table = tensors.get(POSITIONS.format(side=side))
        if table is None:
            continue
        expected = sinusoids(table.shape[0], config.size, config.positions)
        if table.shape != expected.shape or not torch.allclose(table.float(), expected, atol=1e-3):  # it may be float16
            raise ConfigError(f"{named}: the positions of the {side} are not sinusoids, sines first")


@torch.no_grad()
def tensors_of(model: Transformer) -> dict[str, Tensor]:
    """A checkpoint's tensors for one of our models, the reverse of `build_model`.

    Interleaved positions are no hindrance: with all widths put into the order of halves, the model computes the same,
    since nothing but the positions tells one column of a vector from another.

    Raises:
        ConfigError: the model normalises before its sublayers, which MarianMT cannot express.
    """
    config: Config = model.config
    if config.pre_norm:
        raise ConfigError(
            "a MarianMT checkpoint has layer normalisation after each sublayer; train with pre_norm false"
        )
    ours: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    if config.positions == "interleaved":
        order = torch.cat([torch.arange(0, config.size, 2), torch.arange(1, config.size, 2)])
        ours = {name: _reordered(name, tensor, order) for name, tensor in ours.items()}
    tables = _tables(model.source_embedding is model.target_embedding, config.tied)
    theirs = {names[0]: ours[our] for our, names in tables.items()}
    for name, parts in _layers(config):
        theirs |= zip(parts, ours[name].chunk(len(parts)), strict=True)
    bias = ours.get("projection.bias", torch.zeros(model.sizes.target_vocabulary))
    theirs[OUTPUT_BIAS] = bias[None]
    return {name: tensor.clone() for name, tensor in theirs.items()}  # each with memory of its own, to be saved


def _reordered(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """A parameter with its axis of the model's width, if it has one, in another order."""
    kind = name.rsplit(".", 2)[-2:]
    reads = name.endswith(("embedding.weight", "projection.weight", "packed.weight", "query.weight", "up.weight"))
    writes = kind[0] in ("out", "down", "norm")
    if reads:
        return tensor[:, order]
    return tensor[order] if writes else tensor
