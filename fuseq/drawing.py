"""Alignments as shaded blocks in the terminal."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from fuseq.translation import Alignment

SHADES = " ░▒▓█"
WORD_START = "▁"  # SentencePiece's mark of a space before a piece
LONGEST_PIECE = 14


def shade(weight: float) -> str:
    """A block as dark as the weight, 0 to 1."""
    return SHADES[min(len(SHADES) - 1, int(weight * len(SHADES)))]


def _label(piece: str) -> str:
    """The piece as it is read: without the mark of a word's start, short, and safe to print."""
    shown = piece.removeprefix(WORD_START) or piece
    shown = "".join(character if character.isprintable() else "?" for character in shown)
    return shown if len(shown) <= LONGEST_PIECE else shown[: LONGEST_PIECE - 1] + "…"


def draw_alignment(alignment: Alignment) -> Text:
    """One row per target piece, one column per source piece, whose name reads downwards above it."""
    columns = [_label(piece) for piece in alignment.source]
    rows = [_label(piece) for piece in alignment.target]
    margin = max(map(cell_len, rows), default=0)
    height = max(map(len, columns), default=0)
    picture = Text(no_wrap=True)
    for line in range(height):
        # Names stand on the picture: the last letter of each is next to its column.
        letters = [column.rjust(height)[line] for column in columns]
        cells = "".join(letter if cell_len(letter) == 2 else letter + " " for letter in letters)
        picture.append(" " * (margin + 1) + cells.rstrip() + "\n", style="dim")
    for name, weights in zip(rows, alignment.weights, strict=True):
        picture.append(" " * (margin - cell_len(name)) + name + " ", style="bold")
        picture.append("".join(shade(float(weight)) * 2 for weight in weights).rstrip() + "\n", style="cyan")
    picture.rstrip()
    return picture
