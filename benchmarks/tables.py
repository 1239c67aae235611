"""How the records of each kind become a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Format = Callable[[Any], str]


def number(digits: int = 1) -> Format:
    """A number with so many digits after the point."""
    return lambda value: "–" if value is None else f"{value:,.{digits}f}"


def share(value: Any) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{100 * value:.1f}%"


def setting(value: Any) -> str:
    """A setting, short."""
    if not value:
        return "defaults"
    flat = {**{key: item for key, item in value.items() if key != "env"}, **value.get("env", {})}
    return " ".join(f"{key}={item}" for key, item in flat.items())


def shares(value: dict[str, float]) -> str:
    """Named shares, the largest first."""
    return ", ".join(f"{name} {share(item)}" for name, item in sorted(value.items(), key=lambda pair: -pair[1]))


@dataclass(frozen=True, slots=True)
class Layout:
    """How the records of one kind become a table."""

    title: str
    columns: tuple[tuple[str, str, Format], ...]  # heading, field of the record, how it is written


TEXT: Format = lambda value: "–" if value is None else str(value)  # noqa: E731
CELL = (("model", "subject", TEXT), ("beam", "beam", TEXT), ("batch", "batch", TEXT))
LOADED = (("model", "subject", TEXT), ("a call", "inputs", TEXT), ("server", "server", TEXT))
RATIO = (
    ("ours faster", "ours_faster", number(2)),
    ("from", "ours_faster_low", number(2)),
    ("to", "ours_faster_high", number(2)),
)
SPEED = (("sentences/s", "sentences_per_s", number()), ("tokens/s", "tokens_per_s", number(0)),
         ("p50 ms", "p50_ms", number(2)), ("p95 ms", "p95_ms", number(2)))  # fmt: skip

LAYOUTS = {
    "agreement": Layout(
        "Outputs compared with ours in fp32",
        (
            ("model", "subject", TEXT),
            ("beam", "beam", TEXT),
            ("engine", "peer", TEXT),
            ("setting", "setting", setting),
            ("identical", "identical", share),
            ("same until", "prefix", share),
        ),
    ),
    "offline": Layout(
        "Batches",
        (
            *CELL,
            ("engine", "peer", TEXT),
            *SPEED,
            ("peak MiB", "peak_rss_mib", number(0)),
            ("disk MiB", "disk_mib", number()),
            *RATIO,
            ("setting", "setting", setting),
        ),
    ),
    "quality": Layout(
        "BLEU of the same runs",
        (
            ("model", "subject", TEXT),
            ("beam", "beam", TEXT),
            ("engine", "peer", TEXT),
            ("BLEU", "bleu", number(2)),
            ("sentences", "sentences", TEXT),
            ("setting", "setting", setting),
        ),
    ),
    "online-capacity": Layout(
        "Calls a second within a limit of the 95th percentile",
        (
            *LOADED,
            ("limit ms", "limit_ms", number(0)),
            ("calls/s", "calls_per_s", number()),
            ("sentences/s", "sentences_per_s", number()),
            ("saturation", "saturation", number()),
            ("ours faster", "ours_faster", number(2)),
            ("setting", "setting", setting),
        ),
    ),
    "online-share": Layout(
        "At shares of the saturation",
        (
            *LOADED,
            ("share", "share", share),
            ("offered/s", "offered", number()),
            ("answered/s", "answered", number()),
            ("p50 ms", "answered_p50_ms", number()),
            ("p95 ms", "answered_p95_ms", number()),
            ("p99 ms", "answered_p99_ms", number()),
            ("what became of the calls", "counts", TEXT),
        ),
    ),
    "overhead": Layout(
        "Processor time of a saturated server",
        (
            ("model", "subject", TEXT),
            ("calls/s", "calls_per_s", number()),
            ("processors", "processors", number(2)),
            ("outside ONNX Runtime", "outside", share),
            ("parts", "parts", shares),
        ),
    ),
    "idle": Layout(
        "A server that nobody calls",
        (("model", "subject", TEXT), ("first answer s", "first_answer_s", number(2)), ("processor", "idle_cpu", share)),
    ),
    "memory": Layout(
        "Memory",
        (("model", "subject", TEXT), ("started MiB", "started_mib", number()), ("a row MiB", "row_mib", number(3))),
    ),
    "concurrency": Layout(
        "At once",
        (
            ("model", "subject", TEXT),
            ("at once", "at_once", TEXT),
            ("tokens/s", "tokens_per_s", number(0)),
            ("sentences/s", "sentences_per_s", number()),
            ("MiB", "rss_mib", number(0)),
        ),
    ),
    "length": Layout(
        "Length of the output",
        (
            ("model", "subject", TEXT),
            ("tokens", "length", TEXT),
            ("us a token", "us_per_token", number()),
            ("first quarter", "first_quarter_us", number()),
            ("last quarter", "last_quarter_us", number()),
            ("MiB", "rss_mib", number(0)),
        ),
    ),
    "join": Layout(
        "A short sentence among long ones",
        (
            ("model", "subject", TEXT),
            ("engine", "peer", TEXT),
            ("alone ms", "alone_ms", number(2)),
            ("joining ms", "joining_ms", number(2)),
            ("long ones ms", "long_ms", number(2)),
        ),
    ),
    "leak": Layout(
        "Memory over requests",
        (
            ("model", "subject", TEXT),
            ("requests", "requests", TEXT),
            ("bytes a request", "bytes_per_request", number()),
            ("first MiB", "first_mib", number()),
            ("last MiB", "last_mib", number()),
        ),
    ),
    "ceilings": Layout(
        "The machine's ceilings",
        (
            ("memory GB/s", "memory_gbs", number()),
            ("int8 TOP/s", "int8_tops", number(3)),
            ("fp32 TOP/s", "fp32_tops", number(3)),
        ),
    ),
    "floor": Layout(
        "A step and its floor",
        (
            ("model", "subject", TEXT),
            ("rows", "rows", TEXT),
            ("step us", "step_us", number()),
            ("floor us", "floor_us", number()),
            ("bound by", "bound_by", TEXT),
            ("reached", "share", share),
        ),
    ),
    "profile": Layout(
        "Operators",
        (
            ("model", "subject", TEXT),
            ("rows", "rows", TEXT),
            ("stage", "stage", TEXT),
            ("kernels ms", "kernel_ms", number(2)),
            ("operators", "operators", shares),
        ),
    ),
    "parity": Layout(
        "Parity with PyTorch",
        (
            ("model", "subject", TEXT),
            ("sentences", "sentences", TEXT),
            ("fp32", "fp32_identical", share),
            ("default precision", "default_identical", share),
        ),
    ),
    "invariance": Layout(
        "Alone and among neighbours",
        (("model", "subject", TEXT), ("sentences", "sentences", TEXT), ("identical", "identical", share)),
    ),
    "gpu-speed": Layout(
        "Beside PyTorch on the device",
        (
            ("model", "subject", TEXT),
            ("batch", "batch", TEXT),
            ("engine", "peer", TEXT),
            *SPEED,
            *RATIO,
            ("failed", "failed", TEXT),
        ),
    ),
    "floor-check": Layout(
        "Floors",
        (*CELL, ("engine", "peer", TEXT), ("ours faster", "ours_faster", number(2)), ("must be", "least", number(2))),
    ),
}
