"""The settings of a server: one table, from which the options of `fuseq serve` and their help are made.

A value comes from the command line, else from the environment variable FUSEQ_<NAME>, else from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from serving.core.errors import ConfigError
from serving.engine.settings import DEFAULT_MEMORY, EngineSettings

PREFIX = "FUSEQ_"
ADDRESS = r"^(\[[^\]]*\]|[^:\[\]]+):\d{1,5}$"

_ENGINE = EngineSettings()

Command = TypeVar("Command", bound=Callable[..., Any])


class Settings(BaseModel):
    """Every setting: its name, default, limits and help."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: str = Field(
        default="0.0.0.0:50051", pattern=ADDRESS, description="Address of the gRPC service; port 0 takes a free one."
    )
    metrics: str = Field(
        default="0.0.0.0:9464",
        pattern=ADDRESS,
        description="Address of the Prometheus metrics over HTTP; port 0 takes a free one.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device that runs the graphs; auto takes CUDA where it works."
    )
    precision: str = Field(
        default="", description="Precision of the graphs, for instance int8; empty for each bundle's default."
    )
    workers: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Engines that decode each model side by side; 0 for as many as there are processors for.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="Threads of each worker; 0 for the processors that the workers leave, at least one. "
        "More than one help large models only.",
    )
    rows: int = Field(
        default=_ENGINE.rows,
        ge=1,
        le=4096,
        description="Rows that one step of a worker decodes at most; a beam of n takes n of them.",
    )
    queue: int = Field(
        default=_ENGINE.queue,
        ge=1,
        description="Inputs that may wait for a row; beyond it requests are RESOURCE_EXHAUSTED.",
    )
    memory_mib: int = Field(
        default=DEFAULT_MEMORY >> 20,
        ge=1,
        description="Most MiB for the state of the rows; too little means fewer rows.",
    )
    max_inputs: int = Field(
        default=1024, ge=1, description="Inputs that one request may hold; never more than the queue."
    )
    max_beam: int = Field(default=32, ge=1, description="Largest beam that a request may ask for.")
    max_message_mib: int = Field(default=4, ge=1, le=1024, description="Largest request in MiB.")
    grace: float = Field(
        default=30.0, ge=0, description="Seconds that calls in flight may still take after SIGTERM or SIGINT."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe messages to log."
    )


def env_name(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def flag_name(name: str) -> str:
    """The command-line option of a setting."""
    return "--" + name.replace("_", "-")


def _option(name: str, field: FieldInfo) -> Callable[[Command], Command]:
    kind: Any = field.annotation
    if get_origin(kind) is Literal:
        kind = click.Choice(get_args(kind))
    return click.option(
        flag_name(name),
        name,
        type=kind,
        default=field.default,
        envvar=env_name(name),
        show_default=field.default != "",
        show_envvar=True,
        help=field.description,
    )


def settings_options(command: Command) -> Command:
    """Give a click command one option per setting, in the order of the table."""
    for name, field in reversed(Settings.model_fields.items()):
        command = _option(name, field)(command)
    return command


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Check the values.

    Raises:
        ConfigError: a value is out of range; the message names the setting.
    """
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        wrong = "must be HOST:PORT, as 127.0.0.1:50051" if "pattern" in first["type"] else first["msg"]
        raise ConfigError(f"{flag_name(name)} {first['input']}: {wrong}") from None


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port", without the brackets of an IPv6 host."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
