"""Our Transformer with a MarianMT model's tensors computes what that model computes, and the reverse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from export.huggingface.weights import build_model, tensors_of
from serving.core.errors import ConfigError
from serving.core.types import SpecialIds
from training.models.base import Sizes
from training.models.transformer import Config, Transformer

SIZES = {"vocab_size": 60, "decoder_vocab_size": 60, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2}
SIDES = {
    f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("attention_heads", 4), ("ffn_dim", 24))
}
PAD = 49
IDS = {"pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": 0, "forced_eos_token_id": 0}
OURS = {"size": 16, "feed_forward": 24, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "pre_norm": False}


def marian(**options: Any) -> MarianMTModel:
    """A random model; tables, norms and biases as large as training leaves them."""
    torch.manual_seed(0)
    config = MarianConfig(**SIZES | SIDES | IDS | {"max_position_embeddings": 40, "init_std": 0.3} | options)
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name or "bias" in name:
                tensor.add_(torch.randn(tensor.shape) * 0.3)
    return model


def inputs(sources: int = 60, targets: int = 60) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([9, 4, 1], dtype=torch.int32)
    source = torch.randint(0, sources, (3, 9), generator=generator)
    return source, lengths, torch.randint(0, targets, (3, 11), generator=generator)


@torch.inference_mode()
def logits_of(model: MarianMTModel, source: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = (torch.arange(source.shape[1]) < lengths[:, None]).long()
    found: torch.Tensor = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"activation_function": "swish", "scale_embedding": True},
        {"activation_function": "relu", "tie_word_embeddings": False},
        {"activation_function": "gelu", "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 50},
    ],
    ids=["shared", "untied", "separate"],
)
@torch.inference_mode()
def test_logits_are_those_of_the_model(options: dict[str, Any]) -> None:
    theirs = marian(**options)
    config = theirs.config
    ours = Config(
        **OURS,
        tied=config.tie_word_embeddings,
        activation=config.activation_function,
        positions="halves",
        scale_embeddings=config.scale_embedding,
        output_bias=True,
    )
    shared = config.share_encoder_decoder_embeddings
    targets = config.vocab_size if shared else config.decoder_vocab_size
    sizes = Sizes(60, targets, 40, 40, SpecialIds(PAD, PAD, 0, 1), shared_vocabulary=shared)
    built = build_model(ours, sizes, theirs.state_dict(), "weights")
    cell = inputs(targets=targets)
    torch.testing.assert_close(built(*cell), logits_of(theirs, *cell), atol=2e-5, rtol=1e-5)
    assert float(built(*cell).std()) > 0.3  # there is something to compare


@pytest.mark.parametrize("positions", ["interleaved", "halves"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"output_bias": True, "activation": "swish"}, {"activation_function": "swish", "scale_embedding": True}),
        (
            {"tied": False, "scale_embeddings": False},
            {"activation_function": "relu", "tie_word_embeddings": False, "share_encoder_decoder_embeddings": False},
        ),
    ],
    ids=["tied", "untied"],
)
@torch.inference_mode()
def test_a_marian_model_with_our_tensors_computes_what_ours_does(
    ours: dict[str, Any], theirs: dict[str, Any], positions: Any
) -> None:
    torch.manual_seed(2)
    model = Transformer(Config(**OURS | ours, positions=positions), Sizes(60, 60, 40, 40)).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.3)
    made = marian(**theirs)
    missing, unexpected = made.load_state_dict(tensors_of(model), strict=False)
    assert unexpected == []
    made.tie_weights()
    loaded = {name for name in missing if "embed_positions" not in name and name != "lm_head.weight"}
    assert loaded <= {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    cell = inputs()
    torch.testing.assert_close(logits_of(made, *cell), model(*cell), atol=2e-5, rtol=1e-5)


def test_what_a_checkpoint_cannot_express_is_refused() -> None:
    with pytest.raises(ConfigError, match="pre_norm"):
        tensors_of(Transformer(Config(**OURS | {"pre_norm": True}), Sizes(60, 60, 40, 40)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.encoder.layers.1.fc1.bias"), "no tensor model.encoder.layers.1.fc1.bias"),
        (lambda t: t.update({"model.decoder.layers.0.fc2.weight": torch.zeros(3, 24)}), "3 x 24, but .* 16 x 24"),
        (lambda t: t.update({"model.shared.weight": torch.zeros(61, 16)}), "shared.weight is 61 x 16, but .* 60 x 16"),
        (lambda t: t.update({"model.encoder.layer_norm.weight": torch.zeros(16)}), "does not use: model.encoder.layer"),
        (
            lambda t: t.update({"model.encoder.embed_positions.weight": torch.zeros(40, 16)}),
            "encoder are not sinusoids",
        ),
    ],
    ids=["missing", "shape", "vocabulary", "other", "positions"],
)
def test_tensors_that_do_not_fit_are_named(change: Any, message: str) -> None:
    tensors = dict(marian().state_dict())
    change(tensors)
    config = Config(**OURS, activation="gelu", positions="halves", scale_embeddings=False, output_bias=True)
    with pytest.raises(ConfigError, match=message) as error:
        build_model(config, Sizes(60, 60, 40, 40), tensors, "model.bin")
    assert "\n" not in str(error.value)
