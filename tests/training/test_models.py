"""Every architecture keeps the contract: steps equal the teacher-forced forward, padding changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serving.core.errors import ConfigError
from serving.core.state_spec import Role
from training.batching import pad
from training.layers import sinusoids
from training.models.bahdanau import Bahdanau
from training.models.base import Model, Sizes, find_architecture
from training.models.transformer import Transformer

SIZES = Sizes(source_vocabulary=50, target_vocabulary=50, source_limit=40, target_limit=128)
MARIAN = {"activation": "swish", "positions": "halves", "scale_embeddings": False, "output_bias": True}
CASES = [
    (Transformer, {"size": 32, "feed_forward": 48, "heads": 4, "encoder_layers": 2, "decoder_layers": 2}),
    (
        Transformer,
        {"size": 32, "feed_forward": 48, "heads": 2, "encoder_layers": 1, "decoder_layers": 3, "pre_norm": False},
    ),
    (Transformer, {"size": 32, "feed_forward": 48, "heads": 4, "tied": False}),
    (
        Transformer,
        {"size": 32, "feed_forward": 48, "heads": 4, "decoder_layers": 1, "pre_norm": False} | MARIAN,
    ),
    (Bahdanau, {"embedding": 24, "hidden": 32, "attention": 16}),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].__name__}-{'-'.join(f'{k}={v}' for k, v in case[1].items())}")
def model(request: pytest.FixtureRequest) -> Model:
    model_class, keys = request.param
    torch.manual_seed(0)
    built: Any = model_class(model_class.Config(**keys), SIZES)
    for parameter in built.parameters():  # trained models are sharper than fresh ones
        parameter.data.mul_(1.5)
    return built.eval()


def random_ids(rows: int, longest: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
    lengths[0] = longest
    rows_of_ids = [torch.randint(4, 50, (int(n),), generator=generator).tolist() for n in lengths]
    return pad(rows_of_ids, 0), lengths.int()


def run_steps(model: Model, source: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Logits (batch, target, vocabulary) of feeding `target` one token at a time."""
    state = model.initial(model.encode(source, lengths)) | model.empty_caches(len(source), target.shape[1])
    logits = []
    for t in range(target.shape[1]):
        positions = torch.full((len(source),), t, dtype=torch.int32)
        step, updated = model.step(target[:, t], positions, state)
        state |= updated
        logits.append(step)
    return torch.stack(logits, 1)


@torch.inference_mode()
def test_case_53_steps_equal_the_forward_over_100_steps(model: Model) -> None:
    source, lengths = random_ids(3, 9, 1)
    target = torch.cat([torch.ones(3, 1, dtype=torch.int64), torch.randint(4, 50, (3, 99))], 1)
    whole, stepped = model(source, lengths, target), run_steps(model, source, lengths, target)
    torch.testing.assert_close(stepped, whole, atol=1e-4, rtol=1e-4)
    assert torch.equal(stepped.argmax(-1), whole.argmax(-1))


@torch.inference_mode()
def test_rows_may_stand_at_different_positions(model: Model) -> None:
    source, lengths = random_ids(2, 7, 2)
    target = torch.cat([torch.ones(2, 1, dtype=torch.int64), torch.randint(4, 50, (2, 11))], 1)
    whole = model(source, lengths, target)
    state = model.initial(model.encode(source, lengths)) | model.empty_caches(2, 16)
    recurrent = [tensor.name for tensor in model.state_spec().of(Role.RECURRENT)]
    for t in range(12):  # row 1 starts three steps later
        late = max(0, t - 3)
        tokens = torch.stack([target[0, t], target[1, late]])
        before = {name: state[name][1].clone() for name in recurrent}
        logits, updated = model.step(tokens, torch.tensor([t, late], dtype=torch.int32), state)
        state |= updated
        if t < 3:
            for name in recurrent:  # row 1 has not started: its first token is fed again
                state[name][1] = before[name]
    torch.testing.assert_close(logits[1], whole[1, 8], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[0], whole[0, 11], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_case_56_padding_never_changes_a_real_position(model: Model) -> None:
    source, lengths = random_ids(5, 12, 3)
    target = torch.cat([torch.ones(5, 1, dtype=torch.int64), torch.randint(4, 50, (5, 6))], 1)
    together = model(source, lengths, target)
    noisy = source.clone()
    for row, length in enumerate(lengths):
        noisy[row, length:] = torch.randint(4, 50, (12 - int(length),))
    torch.testing.assert_close(model(noisy, lengths, target), together, atol=1e-5, rtol=1e-5)
    for row, length in enumerate(lengths):
        alone = model(source[row : row + 1, :length], lengths[row : row + 1], target[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_alignment_rows_sum_to_one_over_real_positions(model: Model) -> None:
    source, lengths = random_ids(4, 9, 4)
    target = torch.randint(4, 50, (4, 5))
    alignment = model.align(source, lengths, target)
    assert alignment.shape == (4, 5, 9)
    torch.testing.assert_close(alignment.sum(-1), torch.ones(4, 5))
    for row, length in enumerate(lengths):
        assert float(alignment[row, :, length:].sum()) == 0.0


def test_state_matches_its_declaration(model: Model) -> None:
    source, lengths = random_ids(3, 6, 5)
    state = model.initial(model.encode(source, lengths))
    spec = model.state_spec()
    for tensor in spec.of(Role.MEMORY, Role.RECURRENT):
        assert tuple(state[tensor.name].shape) == tensor.shape(3, 6, 0)
        assert str(state[tensor.name].dtype) == f"torch.{tensor.dtype}"
    assert set(state) == {tensor.name for tensor in spec.of(Role.MEMORY, Role.RECURRENT)}
    caches = model.empty_caches(3, 8)
    _, updated = model.step(torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32), state | caches)
    assert set(updated) == {tensor.name for tensor in spec.of(Role.RECURRENT, Role.CACHE)}


def test_architectures_are_found_by_name_and_by_import_path() -> None:
    assert find_architecture("transformer") is Transformer
    assert find_architecture("training.models.bahdanau:Bahdanau") is Bahdanau


def test_sinusoids_follow_the_paper() -> None:
    table = sinusoids(10, 8)
    assert table[7, 4].item() == pytest.approx(torch.sin(torch.tensor(7 / 10000 ** (4 / 8))).item(), abs=1e-6)
    assert table[7, 5].item() == pytest.approx(torch.cos(torch.tensor(7 / 10000 ** (4 / 8))).item(), abs=1e-6)


def test_sinusoids_in_halves_are_the_same_columns_sines_first() -> None:
    assert torch.equal(sinusoids(10, 8, "halves"), sinusoids(10, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]])


@pytest.mark.parametrize("keys", [{"activation": "tanh"}, {"positions": "learned"}])
def test_an_unknown_choice_names_what_is_known(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"relu, swish, gelu.*interleaved, halves"):
        Transformer.Config(**keys)


@torch.inference_mode()
def test_tensors_are_made_on_the_device_of_the_inputs(model: Model) -> None:
    source, lengths = random_ids(3, 6, 6)
    target = torch.randint(4, 50, (3, 4))
    state = model.initial(model.encode(source, lengths)) | model.empty_caches(3, 4)
    fed = target[:, 0], torch.zeros(3, dtype=torch.int32), state
    expected = model(source, lengths, target), model.align(source, lengths, target), model.step(*fed)[0]
    with torch.device("meta"):  # where a tensor lands that is made without naming a device: it has no values
        found = model(source, lengths, target), model.align(source, lengths, target), model.step(*fed)[0]
        assert all(cache.device.type == "cpu" for cache in model.empty_caches(3, 4).values())
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
