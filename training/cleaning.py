"""Cleaning: which pairs of a corpus are fit to learn from, and a report of those that are not.

`normalise` changes only what nobody can see: Unicode composition (NFC), control and invisible formatting characters,
and white space. Everything visible (quotes, dashes, case) stays as it was written; the tokenizer decides about that.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from training.corpus import Pair

EXAMPLES_KEPT = 5
# Soft hyphen, zero-width space, word joiner, byte-order mark, and the marks and embeddings of writing direction. The
# zero-width joiner and non-joiner stay: emoji, Persian and the Indic scripts need them.
INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
SPACE = re.compile(r"\s+")
# What cannot be part of a sentence: the replacement character, lone surrogates, private use, markup and mojibake.
DAMAGED = re.compile(
    "[\ufffd\ud800-\udfff\ue000-\uf8ff]"  # Decoding errors and characters without a meaning
    r"|</?[A-Za-z][^<>]*>|&(?:[a-z]{2,6}|#\d+);"  # Markup
    "|[\u00c3\u00c2][\u0080-\u00bf]|\u00e2\u20ac"  # UTF-8 that was read as Latin-1
)
# The scripts a language is written in, as `unicodedata.name` begins; a language not listed is not checked.
SCRIPTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("en", "de", "fr", "es", "cs", "it", "pt", "nl", "pl", "sv", "da", "fi", "tr"), ("LATIN",)),
    **dict.fromkeys(("ru", "uk", "bg"), ("CYRILLIC",)),
    "zh": ("CJK", "IDEOGRAPHIC"),
    "ja": ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC"),
    "ko": ("HANGUL", "CJK"),
    "el": ("GREEK",),
    "ar": ("ARABIC",),
    "he": ("HEBREW",),
}
WIDE_CHARACTER = 3.0  # Letters of an alphabet that carry about as much as one ideograph, kana or hangul syllable


@dataclass(frozen=True)
class CleaningRules:
    """What is dropped. Lengths are in characters, where a wide (East Asian) character counts as three."""

    longest: float = 500.0
    """A longer sentence is dropped: a paragraph, or a line whose breaks were lost."""
    ratio: float = 3.0
    """Dropped when (longer side + slack) > ratio * (shorter side + slack)."""
    slack: float = 15.0
    """Keeps the ratio from judging greetings: "Hi." and "Grüß Gott!" are fine."""
    script_share: float = 0.5
    """Dropped when fewer of a side's letters than this are of its language's script."""
    copies: bool = False
    """Whether a target equal to its source is kept."""
    duplicates: bool = False
    """Whether a pair that was seen before is kept."""


@dataclass
class DropReport:
    """How many pairs came in, how many were kept, and why the others were not, with the first examples of each."""

    seen: int = 0
    kept: int = 0
    changed: int = 0
    """Kept pairs of which `normalise` changed a side."""
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[list[str]]] = field(default_factory=dict)

    def drop(self, reason: str, pair: Pair) -> None:
        """Count `pair` under `reason`."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES_KEPT:
            examples.append([_shortened(pair.source), _shortened(pair.target)])

    def as_dict(self) -> dict[str, Any]:
        """For JSON; reasons in the order of their number."""
        order = sorted(self.dropped, key=lambda reason: (-self.dropped[reason], reason))
        return {
            "seen": self.seen,
            "kept": self.kept,
            "changed": self.changed,
            "dropped": {reason: self.dropped[reason] for reason in order},
            "examples": {reason: self.examples[reason] for reason in order},
        }


def normalise(text: str) -> str:
    """NFC, no control or invisible characters, every run of white space one space, none at the ends. Idempotent."""
    text = INVISIBLE.sub("", CONTROL.sub("", text))
    return SPACE.sub(" ", unicodedata.normalize("NFC", text)).strip()


def measured_length(text: str) -> float:
    """Characters, a wide one counted as three."""
    if text.isascii():
        return float(len(text))
    return sum(WIDE_CHARACTER if unicodedata.east_asian_width(c) in "WF" else 1.0 for c in text)


def script_share(text: str, language: str) -> float:
    """The share of the text's letters that are of the language's script, wide ones counted as three, so that
    "Tom游泳。" is Chinese; 1 without letters and for languages not listed in `SCRIPTS`.
    """
    scripts = SCRIPTS.get(language)
    if not scripts or (text.isascii() and "LATIN" in scripts):
        return 1.0
    letters = [c for c in text if c.isalpha()]
    ours = "".join(c for c in letters if _script(c) in scripts)
    return measured_length(ours) / measured_length("".join(letters)) if letters else 1.0


def reason_to_drop(pair: Pair, source: str, target: str, rules: CleaningRules) -> str | None:
    """Why a normalised pair of the languages `source` and `target` is not fit to learn from; None if it is."""
    if not pair.source or not pair.target:
        return "empty"
    if DAMAGED.search(pair.source) or DAMAGED.search(pair.target):
        return "damaged"
    short, long = sorted((measured_length(pair.source), measured_length(pair.target)))
    if long > rules.longest:
        return "too long"
    if long + rules.slack > rules.ratio * (short + rules.slack):
        return "length ratio"
    if min(script_share(pair.source, source), script_share(pair.target, target)) < rules.script_share:
        return "wrong script"
    if not rules.copies and pair.source == pair.target:
        return "copy of the source"
    return None


def clean(
    pairs: Iterable[Pair], source: str, target: str, report: DropReport, rules: CleaningRules | None = None
) -> Iterator[Pair]:
    """The pairs that are fit to learn from, normalised, in their order; `report` is filled on the way.

    Duplicates are known by a 16-byte digest each, so a corpus of millions of pairs needs no more than that in memory.
    """
    rules = rules or CleaningRules()
    known: set[bytes] = set()
    for raw in pairs:
        report.seen += 1
        pair = Pair(normalise(raw.source), normalise(raw.target))
        reason = reason_to_drop(pair, source, target, rules)
        if reason is None and not rules.duplicates:
            digest = _digest(pair)
            reason = "duplicate" if digest in known else None
            known.add(digest)
        if reason is not None:
            report.drop(reason, raw)
            continue
        report.kept += 1
        report.changed += pair != raw
        yield pair


def _digest(pair: Pair) -> bytes:
    return hashlib.blake2b(f"{pair.source}\n{pair.target}".encode(), digest_size=16).digest()


def _shortened(text: str, most: int = 120) -> str:
    # Examples end up in a JSON file that must stay valid UTF-8, so lone surrogates are spelt out.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= most else text[: most - 1] + "…"


@functools.lru_cache(maxsize=65536)
def _script(character: str) -> str:
    return unicodedata.name(character, "UNKNOWN").split(" ", 1)[0]
