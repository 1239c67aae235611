"""The contract of a model: what training, search, export and serving may ask of it, whatever its architecture.

An architecture is one file with a frozen `Config` dataclass and a `Model` subclass. A module outside this
repository works the same way: its configuration names it as `package.module:ClassName`.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from serving.core.errors import ConfigError, Unsupported
from serving.core.state_spec import Role, StateSpec
from serving.core.types import SpecialIds

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model must know of its codecs and limits."""

    source_vocabulary: int
    target_vocabulary: int
    source_limit: int  # longest source in tokens, end symbol included
    target_limit: int  # decoder positions: begin symbol and every token fed
    special: SpecialIds = field(default_factory=SpecialIds)
    shared_vocabulary: bool = True  # source and target use one codec, so embeddings may be tied


class Model(nn.Module, ABC):
    """An encoder-decoder. Every method is a pure function of its inputs and the weights; nothing is kept.

    Axes: batch or row, source (positions), target (positions), time (positions a cache has room for).
    Sources are right-padded with `special.pad` and end with `special.eos`; targets fed to the decoder begin with
    `special.bos`. What stands in the padding never changes a real position.
    """

    Config: ClassVar[type[Any]]
    sizes: Sizes

    @abstractmethod
    def encode(self, source: Tensor, lengths: Tensor) -> State:
        """Encode.

        Args:
            source: (batch, source) int64 ids.
            lengths: (batch,) int32, real positions of each row, at least 1.

        Returns:
            The tensors of role `memory`, by name, row axis first.
        """

    def initial(self, memory: State) -> State:
        """The state before the first step: `memory` and the tensors of role `recurrent`.

        Caches are not part of it: they start empty, and whoever runs the steps allocates them (`empty_caches`).
        """
        return memory

    @abstractmethod
    def step(self, tokens: Tensor, positions: Tensor, state: State) -> tuple[Tensor, State]:
        """One decoder step.

        Args:
            tokens: (row,) int64 ids fed.
            positions: (row,) int32, each row's own position, from 0.
            state: every tensor of `state_spec`, by name.

        Returns:
            Logits (row, target vocabulary), and the tensors of roles `recurrent` and `cache`, by name.
        """

    @abstractmethod
    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Teacher-forced logits for training.

        Args:
            source: (batch, source) int64.
            lengths: (batch,) int32.
            target: (batch, target) int64, begin symbol first, right-padded.

        Returns:
            (batch, target, target vocabulary): position t predicts the token after `target[:, t]`.
        """

    def align(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Attention of each predicted token over the source, (batch, target, source); rows sum to 1.

        Raises:
            Unsupported: the model has no attention.
        """
        raise Unsupported(f"{type(self).__name__} has no attention and so no alignments")

    @abstractmethod
    def state_spec(self) -> StateSpec:
        """The decoder's state, in graph order."""

    @property
    def has_alignment(self) -> bool:
        """Whether `align` works: true where a subclass defines it."""
        return type(self).align is not Model.align

    def empty_caches(self, rows: int, time: int) -> State:
        """Zeroed caches with room for `time` positions, on the model's device."""
        device = device_of(self)
        return {
            tensor.name: torch.zeros(tensor.shape(rows, 0, time), dtype=getattr(torch, tensor.dtype), device=device)
            for tensor in self.state_spec().of(Role.CACHE)
        }


def device_of(model: nn.Module) -> torch.device:
    """Where the model's weights are."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def find_architecture(name: str) -> type[Model]:
    """The model class called `name`: a file of `training.models`, or `package.module:ClassName` from anywhere.

    A module of the user's own may be installed, on PYTHONPATH, or in the folder where the command is run.

    Raises:
        ConfigError: there is no such class.
    """
    module_name, _, class_name = name.partition(":")
    if not class_name:
        module_name, class_name = f"training.models.{name}", name.title().replace("_", "")
    elif not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # last: a file there shadows nothing
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"architecture {name!r}: {error}; name a file of training/models or module:Class") from error
    if not (isinstance(found, type) and issubclass(found, Model)):
        raise ConfigError(f"architecture {name!r}: {class_name} is not a subclass of training.models.base.Model")
    return found
