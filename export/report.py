"""A bundle as tables in the terminal, and the bar of an export that runs. Needs neither torch nor onnx."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from serving.core.manifest import Bundle, GraphSet

NEIGHBOURS = "neighbours"  # in a precision's parity: how far a score moves with the rows beside it
NOTED = (
    "MatMulIntegerToFloat",
    "GatherBlockQuantized",
    "GroupQueryAttention",
    "Attention",
    "LayerNormalization",
    "LSTM",
    "GRU",
)


class Bar:
    """Shows each stage of an export, with rate and time left where the amount of work is known."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: Any = None

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self._finish()
        self._progress.stop()

    def begin(self, what: str, total: int | None = None) -> None:
        """A new stage; the one before is done."""
        self._finish()
        self._task = self._progress.add_task(what, total=total)

    def advance(self, count: int = 1) -> None:
        """So much more of the stage is done."""
        if self._task is not None:
            self._progress.advance(self._task, count)

    def _finish(self) -> None:
        if self._task is not None:
            total = self._progress.tasks[self._task].total or 1
            self._progress.update(self._task, total=total, completed=total)


class _Rate(TextColumn):
    """Units a second."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Any) -> Any:
        self.text_format = f"{task.speed:,.1f}/s" if task.speed and task.total else ""
        return super().render(task)


def show(bundle: Bundle, console: Console | None = None) -> None:
    """Print everything a person asks of a bundle."""
    console = console or Console()
    manifest = bundle.manifest
    total = sum(entry.bytes for entry in manifest.files.values())
    languages = f"{manifest.source_language or '?'} to {manifest.target_language or '?'}"
    console.print(f"[bold]{manifest.name}[/] {manifest.version}: {languages}, {manifest.architecture}, {_size(total)}")
    console.print(_facts(bundle))
    console.print(_graphs(bundle))
    console.print(_state(bundle))
    for precision, graphs in manifest.precisions.items():
        console.print(_proof(precision, graphs))


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def _facts(bundle: Bundle) -> Table:
    manifest, table = bundle.manifest, Table(show_header=False, title="model", title_justify="left")
    search, provenance = manifest.search, manifest.provenance
    training = provenance.details.get("training", {})
    rows = {
        "configuration": ", ".join(f"{key} {value}" for key, value in manifest.architecture_config.items()),
        "codec": f"{manifest.source_codec.kind}, {manifest.source_codec.size:,} pieces, "
        f"normalisation {manifest.source_codec.normalisation or 'unknown'}",
        "limits": f"{manifest.limits.source} source tokens, {manifest.limits.target} decoder positions",
        "search": f"beam {search.beam}, length penalty {search.length_penalty} ({search.length_normalisation}), "
        f"at most {search.max_length_ratio} x source + {search.max_length_margin} tokens",
        "tools": f"opset {manifest.tools.opset}, IR {manifest.tools.ir}, "
        + ", ".join(f"{name} {version}" for name, version in manifest.tools.versions.items()),
        "data": provenance.data,
        "licence": provenance.licence,
        "attribution": provenance.attribution,
        "training": ", ".join(_plain(training)),
        "imported": ", ".join(_plain(provenance.details.get("import", {}))),
    }
    for key, value in rows.items():
        if value:
            table.add_row(key, value)
    return table


def _plain(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """The strings and numbers of a nested dictionary, two levels deep, long ones cut."""
    found = []
    for key, value in tree.items():
        if isinstance(value, dict) and not prefix:
            found += _plain(value, f"{key}.")
        elif isinstance(value, float):
            found.append(f"{prefix}{key} {value:g}")
        elif isinstance(value, str | int) and value != "":
            text = str(value)
            found.append(f"{prefix}{key} {text if len(text) <= 40 else text[:12] + '...'}")
    return found


def _graphs(bundle: Bundle) -> Table:
    table = Table(title="files", title_justify="left")
    for column in ("file", "what", "size"):
        table.add_column(column, justify="right" if column == "size" else "left", no_wrap=column != "what")
    manifest = bundle.manifest
    what = dict.fromkeys((*manifest.source_codec.files(), *manifest.target_codec.files()), "codec")
    for precision, graphs in manifest.precisions.items():
        default = ", the default" if precision == manifest.default_precision else ""
        for stage, file in graphs.graphs.items():
            what[file] = f"{precision}{default}: {stage}, {sum(graphs.operators.get(stage, {}).values())} operators"
        what[f"weights.{precision}.bin"] = f"{precision}{default}: weights of all stages"
    for file, entry in manifest.files.items():
        table.add_row(file, what.get(file, ""), _size(entry.bytes))
    return table


def _state(bundle: Bundle) -> Table:
    table = Table("tensor", "axes", "type", "role", title="decoder state", title_justify="left")
    for entry in bundle.manifest.state:
        table.add_row(entry.name, " x ".join(map(str, entry.axes)), entry.dtype, str(entry.role))
    return table


def _proof(precision: str, graphs: GraphSet) -> Table:
    table = Table(show_header=False, title=f"{precision}: operators and proof", title_justify="left")
    for stage, counts in graphs.operators.items():
        shown = [f"{counts[kind]} {kind}" for kind in NOTED if counts.get(kind)]
        rest = sum(counts.values()) - sum(counts.get(kind, 0) for kind in NOTED)
        table.add_row(stage, ", ".join([*shown, f"{rest} others"]))
    for stage, kinds in graphs.fusions.items():
        rewritten = [f"{count} {kind}" for kind, count in kinds.items() if kind not in NOTED]
        table.add_row(f"{stage}, rewritten", ", ".join(rewritten) or "nothing")
    for stage, difference in graphs.parity.items():
        if stage == NEIGHBOURS:
            table.add_row("neighbours", f"move a score by at most {difference:.2g}")
        else:
            table.add_row(f"{stage}, from PyTorch", f"{difference:.2g}")
    for key, value in graphs.quality.items():
        table.add_row(key, f"{value:,g}" if isinstance(value, float) else str(value))
    if not graphs.quality:
        table.add_row("quality", "not measured")
    for key, value in graphs.quantized.items():
        for line in value if isinstance(value, list) else [value]:
            table.add_row(key, line if isinstance(line, str) else json.dumps(line, ensure_ascii=False))
    return table
