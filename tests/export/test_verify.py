"""The checks find what is right right, and what is wrong wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from export.decoding import decode
from export.errors import ParityError
from export.verify import TOLERANCE, check_cached_decoding, check_parity, measure_parity
from serving.core.types import SearchOptions
from tests.export.conftest import Built
from training.decode import decode as decode_in_torch
from training.models.base import Model


def test_case_53_cached_decoding_equals_uncached_over_100_steps(built: Built) -> None:
    assert check_cached_decoding(built.model, built.sessions("fp32")) == 100


@contextmanager
def nudged(model: Model, name: str) -> Iterator[None]:
    """A weight of the PyTorch model moved, so that the graphs are not its own any more."""
    parameter = dict(model.named_parameters())[name]
    with torch.no_grad():
        parameter.add_(0.05)
        yield
        parameter.sub_(0.05)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("encoder.0.feed_forward.up.weight", {"encode", "align"}),  # the step begins from PyTorch's own state
        ("decoder.1.cross.query.weight", {"step", "align"}),
        ("decoder.1.attention.packed.bias", {"step", "align"}),
    ],
)
def test_a_graph_with_other_weights_is_found_out(transformer: Built, name: str, stages: set[str]) -> None:
    with nudged(transformer.model, name):
        parity = measure_parity(transformer.model, transformer.sessions("fp32"))
        assert {stage for stage, value in parity.items() if value > TOLERANCE} == stages
        with pytest.raises(ParityError, match="differs from PyTorch by"):
            check_parity(parity)
        with pytest.raises(ParityError, match="leaves uncached decoding"):
            check_cached_decoding(transformer.model, transformer.sessions("fp32"))


def test_not_a_number_is_no_parity() -> None:
    with pytest.raises(ParityError, match="stage step"):
        check_parity({"step": float("nan")})


def test_case_29_56_a_padded_source_equals_itself_alone(bahdanau: Built) -> None:
    sessions = bahdanau.sessions("fp32")
    random = np.random.default_rng(0)
    lengths = np.array([10, 8, 4, 2, 1], np.int32)
    source = random.integers(0, 1040, (5, 10))
    together = sessions.encode(source, lengths)
    for row, length in enumerate(lengths):
        alone = sessions.encode(source[row : row + 1, :length], lengths[row : row + 1])
        for name in ("hidden", "cell"):
            assert np.allclose(alone[name][0], together[name][row], atol=1e-5)
        assert np.allclose(alone["memory"][0], together["memory"][row, :length], atol=1e-5)
        assert not together["memory"][row, length:].any()  # zero in the padding


@pytest.mark.parametrize("beam", [1, 4])
def test_reference_decoding_equals_decoding_in_pytorch(built: Built, beam: int) -> None:
    sizes, random = built.model.sizes, np.random.default_rng(3)
    sources = [random.integers(4, 1040, random.integers(1, 9)).tolist() for _ in range(7)]
    options = SearchOptions(beam=beam, nbest=beam, max_length_ratio=1.0, max_length_margin=4)
    ended = [[*source, sizes.special.eos] for source in sources]
    spec = built.model.state_spec()
    found = decode(built.sessions("fp32"), spec, sizes.special, sizes.target_limit, ended, options, batch=3)
    expected = decode_in_torch(built.model, sources, options)
    for one, other in zip(found, expected, strict=True):
        assert [h.tokens for h in one] == [h.tokens for h in other]
        assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-4)
