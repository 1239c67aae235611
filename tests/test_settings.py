"""The table of settings: every one is documented, can be set in each way, and is checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from serving.config import Settings, env_name, flag_name, make_settings, settings_options, split_address
from serving.core.errors import ConfigError

DOCS = Path(__file__).resolve().parent.parent / "docs" / "service.md"
NAMES = list(Settings.model_fields)


def documented_settings() -> dict[str, tuple[str, str, str]]:
    """Flag -> (environment variable, default, help) as the table in docs/service.md says."""
    rows = re.findall(r"^\| `(--[a-z-]+)` \| `(FUSEQ_[A-Z_]+)` \| (.*?) \| (.*) \|$", DOCS.read_text("utf-8"), re.M)
    return {flag: (env, default, text) for flag, env, default, text in rows}


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_documented_as_it_is(name: str) -> None:
    field = Settings.model_fields[name]
    default = f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"
    expected = (env_name(name), default if field.default != "" else "", field.description)
    assert documented_settings().get(flag_name(name)) == expected


def test_nothing_is_documented_that_does_not_exist() -> None:
    assert set(documented_settings()) == {flag_name(name) for name in NAMES}


@click.command()
@settings_options
def probe(**values: Any) -> None:
    click.echo(make_settings(values).model_dump_json())


def settings_from(arguments: list[str], environment: dict[str, str]) -> Settings:
    done = CliRunner().invoke(probe, arguments, env=environment, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return Settings.model_validate_json(done.output)


def test_the_defaults_are_the_table() -> None:
    assert settings_from([], {}) == Settings()


OTHERS = {"listen": "127.0.0.1:1", "metrics": "[::1]:2", "device": "cpu", "precision": "fp32", "log_level": "error"}


@pytest.mark.parametrize("name", NAMES)
def test_environment_beats_default_and_flag_beats_environment(name: str) -> None:
    field = Settings.model_fields[name]
    value = OTHERS.get(name) or str(field.default + 1)
    assert str(getattr(settings_from([], {env_name(name): value}), name)) == str(type(field.default)(value))
    back = settings_from([flag_name(name), str(field.default)], {env_name(name): value})
    assert getattr(back, name) == field.default


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", 0), ("queue", -1), ("listen", "no-port"), ("listen", "::1:5"), ("grace", -1.0), ("device", "tpu")],
)
def test_a_bad_value_is_one_line_that_names_the_setting(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag_name(name)} ") as caught:
        make_settings({name: value})
    assert "\n" not in str(caught.value)
    assert "pattern" not in str(caught.value)  # an address is described, not its regular expression


def test_addresses() -> None:
    assert split_address("0.0.0.0:50051") == ("0.0.0.0", 50051)
    assert split_address("[::]:0") == ("::", 0)
