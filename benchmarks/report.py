"""Tables and figures from records: on the terminal, and for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.records import Record
from benchmarks.tables import LAYOUTS, TEXT, Layout, setting, shares
from serving.core.errors import ConfigError


def rows_of(layout: Layout, records: Iterable[Record]) -> list[list[str]]:
    """The cells of a table."""
    return [
        [form(record.get(name)) if name in record else "" for _, name, form in layout.columns] for record in records
    ]


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    """The records of one kind."""
    return [record for record in records if record["record"] == kind]


def headline(records: Sequence[Record]) -> str:
    """Date, commit, machine and versions in one line."""
    runs = of_kind(records, "run")
    if not runs:
        return ""
    run = runs[0]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    machine = run["machine"]
    note = " (toy models: only to see that it works)" if run.get("tiny") else ""
    return (
        f"{run['date']}, commit {run['commit'] or 'unknown'}, {machine['processor']}, {len(machine['cpus'])} CPUs, "
        f"{', '.join(machine['features']) or 'no known vector extensions'}; {versions}{note}"
    )


def show(records: Sequence[Record], console: Console) -> None:
    """Print every table."""
    console.print(headline(records), highlight=False, markup=False)
    for kind, layout in LAYOUTS.items():
        found = of_kind(records, kind)
        if not found:
            continue
        table = Table(title=layout.title, title_justify="left")
        for heading, _, form in layout.columns:
            table.add_column(heading, justify="left" if form in (TEXT, setting, shares) else "right")
        for row in rows_of(layout, found):
            table.add_row(*row)
        console.print(table)


def markdown(records: Sequence[Record]) -> str:
    """Every table in Markdown, under a line that says where and when."""
    parts = [headline(records)]
    for kind, layout in LAYOUTS.items():
        found = of_kind(records, kind)
        if found:
            head = "| " + " | ".join(heading for heading, _, _ in layout.columns) + " |"
            lines = ["| " + " | ".join(row) + " |" for row in rows_of(layout, found)]
            parts.append("\n".join([f"### {layout.title}", "", head, "|---" * len(layout.columns) + "|", *lines]))
    return "\n\n".join(parts) + "\n"


def figure(records: Sequence[Record], path: Path) -> None:
    """Latency against load of every server, a panel for each model and number of sentences a call.

    Raises:
        ConfigError: there are no loads among the records.
    """
    loads = of_kind(records, "online-load")
    if not loads:
        raise ConfigError("no loads to draw: run `python -m benchmarks online --json FILE` first")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((record["subject"], record["inputs"]) for record in loads))
    drawing, axes = pyplot.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.8), squeeze=False)
    for axis, (subject, inputs) in zip(axes[0], panels, strict=True):
        here = [record for record in loads if (record["subject"], record["inputs"]) == (subject, inputs)]
        for server in dict.fromkeys(record["server"] for record in here):
            points = sorted(
                (r["rate"] * inputs, r["p95_ms"]) for r in here if r["server"] == server and r["p95_ms"] is not None
            )
            axis.plot(*zip(*points, strict=True) if points else ([], []), marker="o", markersize=3, label=server)
        for limit in (50, 200, 500):
            axis.axhline(limit, color="0.8", linewidth=0.8, zorder=0)
        axis.set(yscale="log", xlabel="sentences/s offered", ylabel="95th percentile, ms")
        axis.set_title(f"{subject}, {inputs} sentence{'s' * (inputs > 1)} a call", fontsize=10)
        axis.legend(fontsize=8)
    drawing.text(0.01, 0.01, headline(records)[:160], fontsize=5, color="0.4")
    drawing.tight_layout(rect=(0, 0.03, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=150)
    pyplot.close(drawing)
