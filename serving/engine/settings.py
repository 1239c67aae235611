"""How large an engine may get."""

from __future__ import annotations

from dataclasses import dataclass

from serving.core.errors import ConfigError

DEFAULT_MEMORY = 2 << 30


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The limits of an engine."""

    rows: int = 128  # rows that a step decodes at most; a beam of n takes n of them
    queue: int = 1024  # jobs that may wait for rows; one more is Overloaded
    memory_bytes: int = 0  # for the state of all rows, 0 for 2 GiB; fewer rows are made where they would take more
    encode_tokens: int = 512  # source tokens encoded between two steps, unless one source alone is longer
    bypass: int = 64  # younger jobs that may overtake a waiting one

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("queue", 1), ("memory_bytes", 0), ("encode_tokens", 1), ("bypass", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"engine setting {name} is {value}; it must be at least {least}")
