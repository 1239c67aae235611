"""A model from outside: a bag-of-words encoder and a decoder that sums what it has said. It proves the contract."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from serving.core.state_spec import ROW, Role, StateSpec, StateTensor
from training.models.base import Model, Sizes, State


@dataclass(frozen=True, slots=True)
class Config:
    size: int = 32


class BagOfWords(Model):
    Config = Config

    def __init__(self, config: Config, sizes: Sizes) -> None:
        super().__init__()
        self.config, self.sizes = config, sizes
        self.source_embedding = nn.Embedding(sizes.source_vocabulary, config.size)
        self.target_embedding = nn.Embedding(sizes.target_vocabulary, config.size)
        self.mix = nn.Linear(3 * config.size, config.size)
        self.projection = nn.Linear(config.size, sizes.target_vocabulary)

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        live = torch.arange(source.shape[1], device=source.device) < lengths[:, None]  # (batch, source)
        summed = (self.source_embedding(source) * live[..., None]).sum(1)  # (batch, size)
        return {"bag": summed / lengths[:, None]}

    def initial(self, memory: State) -> State:
        return {**memory, "said": torch.zeros_like(memory["bag"])}

    def _logits(self, token: Tensor, bag: Tensor, said: Tensor) -> Tensor:
        return self.projection(torch.tanh(self.mix(torch.cat([token, bag, torch.tanh(said)], -1))))

    def step(self, tokens: Tensor, positions: Tensor, state: State) -> tuple[Tensor, State]:
        token = self.target_embedding(tokens)  # (row, size)
        said = state["said"] + token
        return self._logits(token, state["bag"], said), {"said": said}

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        token = self.target_embedding(target)  # (batch, target, size)
        bag = self.encode(source, lengths)["bag"][:, None].expand_as(token)
        return self._logits(token, bag, token.cumsum(1))

    def state_spec(self) -> StateSpec:
        size = self.config.size
        bag = StateTensor("bag", "float32", (ROW, size), Role.MEMORY)
        return StateSpec((bag, StateTensor("said", "float32", (ROW, size), Role.RECURRENT)))
