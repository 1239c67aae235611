"""Schedules have their shapes, Muon's updates are orthogonal, and every parameter has one optimiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from training.config import Optimiser, Schedule
from training.models.bahdanau import Bahdanau
from training.models.base import Model, Sizes
from training.models.transformer import Transformer
from training.optim import Muon, make_optimisers, orthogonalise, rate_factor, set_rates

SIZES = Sizes(source_vocabulary=20, target_vocabulary=20, source_limit=16, target_limit=16)


def test_the_trapezoid_rises_stays_and_falls() -> None:
    schedule = Schedule(kind="trapezoid", steps=100, warmup=10, decay=0.4)
    factors = [rate_factor(step, schedule) for step in range(101)]
    assert factors[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert factors[10:60] == [1.0] * 50
    assert factors[60:] == pytest.approx([(100 - step) / 40 for step in range(60, 101)])


def test_the_inverse_root_follows_the_paper() -> None:
    schedule = Schedule(kind="inverse_root", steps=1000, warmup=100)
    # Vaswani et al. 2017, eq. 3, divided by its largest value, which it has at the end of the warm-up.
    paper = [min(n**-0.5, n * 100**-1.5) / 100**-0.5 for n in range(1, 1001)]
    assert [rate_factor(step, schedule) for step in range(1000)] == pytest.approx(paper)


@given(
    st.sampled_from(["trapezoid", "inverse_root"]), st.integers(1, 300), st.integers(0, 400), st.floats(0, 1), st.data()
)
def test_a_rate_is_never_outside_zero_to_peak(kind: Any, steps: int, warmup: int, decay: float, data: Any) -> None:
    step = data.draw(st.integers(0, steps))
    assert 0 <= rate_factor(step, Schedule(kind=kind, steps=steps, warmup=warmup, decay=decay)) <= 1


@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64), (1, 24)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_orthogonalised_singular_values_are_near_one(shape: tuple[int, int], scale: float) -> None:
    random = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    u, _, v = torch.linalg.svd(random, full_matrices=False)
    matrix = scale * u @ torch.diag(torch.linspace(1, 0.05, min(shape))) @ v  # far from orthogonal
    result = orthogonalise(matrix[None])[0]
    values = torch.linalg.svdvals(result)
    assert result.shape == shape
    assert 0.65 < float(values.min()) <= float(values.max()) < 1.25
    torch.testing.assert_close(u.T @ result @ v.T, torch.diag(torch.diag(u.T @ result @ v.T)), atol=1e-4, rtol=0)


def test_one_muon_step_is_its_formula() -> None:
    weight = nn.Parameter(torch.ones(4, 2))
    gradient = torch.randn(4, 2, generator=torch.Generator().manual_seed(4))
    optimiser = Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.5)
    weight.grad = gradient.clone()
    optimiser.step()
    nesterov = gradient * 0.1 + 0.9 * (gradient * 0.1)  # g + m (m' - g), where m' = (1 - m) g
    update = orthogonalise(gradient.lerp(gradient * 0.1, 0.9)[None])[0]
    assert torch.allclose(
        update, orthogonalise(nesterov[None])[0], atol=1e-3
    )  # the scale of what is orthogonalised is lost
    assert torch.allclose(weight, torch.ones(4, 2) * (1 - 0.1 * 0.5) - 0.1 * 2**0.5 * update, atol=1e-6)


def test_matrices_of_one_shape_are_updated_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    shapes = [(4, 2), (4, 2), (2, 4), (4, 2), (3, 3)]
    together = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    alone = [nn.Parameter(parameter.detach().clone()) for parameter in together]
    optimisers = [Muon(together, lr=0.1), *(Muon([parameter], lr=0.1) for parameter in alone)]
    for _ in range(3):
        for one, other in zip(together, alone, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        together[3].grad = alone[3].grad = None  # frozen
        for optimiser in optimisers:
            optimiser.step()
    torch.testing.assert_close(together, alone)


MODELS = [
    Transformer(Transformer.Config(size=16, feed_forward=16, heads=2, encoder_layers=1, decoder_layers=1), SIZES),
    Transformer(Transformer.Config(size=16, feed_forward=16, heads=2, pre_norm=False, tied=False), SIZES),
    Bahdanau(Bahdanau.Config(embedding=8, hidden=8, attention=8), SIZES),
]


@pytest.mark.parametrize("model", MODELS, ids=["tied", "untied", "bahdanau"])
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_every_parameter_has_one_optimiser(model: Model, name: Any) -> None:
    optimisers = make_optimisers(model, Optimiser(name=name, rate=0.003, matrix_rate=0.07, weight_decay=0.2))
    held = [id(p) for optimiser in optimisers for group in optimiser.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muons = [names[id(p)] for o in optimisers if isinstance(o, Muon) for g in o.param_groups for p in g["params"]]
    if name == "adamw":
        assert muons == []
    else:
        assert muons
        assert not [name for name in muons if "embedding" in name or "norm" in name or "projection" in name]
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            assert group["peak"] == (0.07 if isinstance(optimiser, Muon) else 0.003)
            if any(parameter.dim() == 1 for parameter in group["params"]):
                assert group["weight_decay"] == 0.0


def test_rates_are_shares_of_the_peaks() -> None:
    optimisers = make_optimisers(MODELS[0], Optimiser(name="muon", rate=0.002, matrix_rate=0.02))
    set_rates(optimisers, 0.25)
    rates = {type(o).__name__: [group["lr"] for group in o.param_groups] for o in optimisers}
    assert rates == {"AdamW": [0.0005, 0.0005], "Muon": [0.005]}
