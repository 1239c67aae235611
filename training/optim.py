"""Optimisers and learning-rate schedules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from training.config import Optimiser, Schedule


def rate_factor(step: int, schedule: Schedule) -> float:
    """Share of the peak learning rate at `step` (from 0)."""
    warm = min(1.0, (step + 1) / schedule.warmup) if schedule.warmup else 1.0
    if schedule.kind == "inverse_root":  # Vaswani et al. 2017, eq. 3, scaled to a peak of 1
        return float(warm * min(1.0, (max(schedule.warmup, 1) / (step + 1)) ** 0.5))
    left = (schedule.steps - step) / max(1.0, schedule.decay * schedule.steps)
    return min(warm, 1.0, max(0.0, left))


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly, by the quintic Newton-Schulz iteration of Muon (Jordan et al. 2024).

    Singular values end between about 0.7 and 1.2. Each iteration multiplies X by a polynomial of X X^T. These
    polynomials commute, so they are multiplied together on the small side, and the product meets X once. In
    float32: torch's own Muon iterates in bfloat16, which processors without bfloat16 arithmetic run a hundred times
    slower.

    Args:
        matrices: (count, rows, columns).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    gram = x @ x.mT  # (count, short, short)
    product: Tensor | None = None
    for iteration in range(iterations):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        product = polynomial if product is None else polynomial @ product
        if iteration + 1 < iterations:
            gram = polynomial @ gram @ polynomial
    x = x if product is None else product @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is orthogonalised (Jordan et al. 2024), with decoupled weight decay."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for parameters in alike.values():  # of one shape at once: small products alone leave cores idle
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        directions = torch.stack([self._direction(parameter, group["momentum"]) for parameter in parameters])
        for parameter, update in zip(parameters, orthogonalise(directions), strict=True):
            scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"] * scale)

    def _direction(self, parameter: Tensor, momentum: float) -> Tensor:
        """Nesterov's look ahead along the momentum."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum"], momentum)


def make_optimisers(model: nn.Module, settings: Optimiser) -> list[torch.optim.Optimizer]:
    """The optimisers of a model; each group's peak rate stands in `peak`."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.dim() == 2 and id(parameter) not in embeddings and not name.startswith("projection")
        (matrices if settings.name == "muon" and hidden else rest).append(parameter)
    decayed = [p for p in rest if p.dim() > 1]
    plain = [p for p in rest if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=settings.rate, betas=settings.betas, eps=1e-9)
    optimisers: list[torch.optim.Optimizer] = [adamw]
    if matrices:
        optimisers.append(Muon(matrices, settings.matrix_rate, weight_decay=settings.weight_decay))
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["peak"] = group["lr"]
    return optimisers


def set_rates(optimisers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's rate to `factor` of its peak."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = factor * group["peak"]
