"""`fuseq demo`: starts a server on the bundled model, asks it five sentences over gRPC, shows what came back."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.table import Table

from fuseq.client import Client
from fuseq.drawing import draw_alignment
from serving.core.errors import FuseqError, Unavailable

SENTENCES = (
    "Where is the next train station?",
    "My sister has lived in this house for ten years.",
    "I would like a cup of coffee without sugar.",
    "If it rains tomorrow, we will stay at home.",
    "He asked me whether I had already read the book.",
)
METRICS = ('fuseq_requests_total{outcome="ok"}', "fuseq_tokens_out_total", "fuseq_rows_per_step_count")
READY = re.compile(r"serving gRPC on \S+:(\d+), metrics on \S+:(\d+)")
PATIENCE = 60.0  # seconds for the server to start or to stop


def _ports(server: subprocess.Popen[str]) -> tuple[int, int]:
    """Read the server's log until it names its ports."""
    assert server.stderr is not None
    last = "it said nothing"
    for line in server.stderr:
        last = line.strip() or last
        if found := READY.search(line):
            return int(found[1]), int(found[2])
    raise Unavailable(f"the server did not start: {last}")


@contextmanager
def _server() -> Iterator[tuple[int, int]]:
    """A server on free ports, stopped at the end; yields its ports."""
    command = [sys.executable, "-m", "fuseq", "serve", "--log-level", "info"]
    command += ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(PATIENCE, server.kill)
    watchdog.start()
    try:
        ports = _ports(server)
        watchdog.cancel()
        threading.Thread(target=server.communicate, daemon=True).start()  # nobody reads the rest of its log
        yield ports
    finally:
        watchdog.cancel()
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            server.kill()
    if server.returncode != 0:
        raise FuseqError(f"the server ended with status {server.returncode}")


def _translate(client: Client, console: Console) -> None:
    """The five sentences in a table, then one alignment."""
    table = Table("English", "German", "score", "ms", title="over gRPC, beam 4")
    for column in table.columns[2:]:
        column.justify = "right"
    for sentence in SENTENCES:
        begin = time.perf_counter()
        answer = client.translate(sentence, beam=4)
        table.add_row(sentence, answer.text, f"{answer.score:.3f}", f"{1000 * (time.perf_counter() - begin):.1f}")
    console.print(table)
    if client.models()[0].alignments:
        picture = client.translate(SENTENCES[0], beam=4, alignments=True).alignment
        assert picture is not None
        console.print("\nWhere the translation looks while it is written:\n", draw_alignment(picture), sep="")


def _metrics(port: int, console: Console) -> None:
    """Three lines of what Prometheus would read."""
    url = f"http://127.0.0.1:{port}/metrics"
    console.print(f"\n{url} says, among others:", highlight=False)
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode("utf-8").splitlines()
    for line in lines:
        if line.startswith(METRICS):
            console.print(f"  {line}", highlight=False, markup=False)


@click.command()
def demo() -> None:
    """Serve the bundled model on free ports, translate five sentences, draw an alignment, show three metrics."""
    console = Console(soft_wrap=not sys.stdout.isatty())
    begin = time.perf_counter()
    with _server() as (port, metrics_port):
        console.print(f"server ready on 127.0.0.1:{port} after {time.perf_counter() - begin:.1f} s", highlight=False)
        with Client(f"127.0.0.1:{port}") as client:
            _translate(client, console)
        _metrics(metrics_port, console)
    console.print(f"server stopped; {time.perf_counter() - begin:.1f} s in all", highlight=False)
