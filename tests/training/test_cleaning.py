"""Cleaning: only what nobody can see is changed, and every dropped pair is counted under its reason."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.cleaning import CleaningRules, DropReport, clean, measured_length, normalise, reason_to_drop, script_share
from training.corpus import Pair

RULES = CleaningRules()


@given(st.text())
def test_normalised_text_is_one_composed_line_and_stays_as_it_is(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
    assert once == unicodedata.normalize("NFC", once)
    assert once == " ".join(once.split())
    assert "\n" not in once
    assert "\r" not in once


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("  a\u00a0b \t c\u202f! ", "a b c !"),
        ("Gru\u0308\u00dfe", "Grüße"),
        ("Donau\u00addampf\u200bschiff\ufeff", "Donaudampfschiff"),
        ("bell\x07 and\u0085line", "bell and line"),
        ("👩\u200d💻 👍🏽", "👩\u200d💻 👍🏽"),  # Joiner and skin tone belong to the emoji
        ("می\u200cخواهم", "می\u200cخواهم"),  # And the non-joiner to the word
        ("„Ja“ – sagte’s …", "„Ja“ – sagte’s …"),
        ("  ", ""),
    ],
)
def test_normalise(raw: str, expected: str) -> None:
    assert normalise(raw) == expected


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("Hi.", "Grüß Gott!", None),
        ("Tom ate.", "", "empty"),
        ("I am tired.", "Ich bin m\ufffdde.", "damaged"),
        ("I am tired.", "Ich bin m\u00c3\u00bcde.", "damaged"),
        ("Stone &amp; tile.", "Stein und Fliesen.", "damaged"),
        ("I said <b>no</b>.", "Ich sagte nein.", "damaged"),
        ("I <3 you, and 2 > 1.", "Ich <3 dich, und 2 > 1.", None),
        ("word " * 101, "Wort " * 101, "too long"),
        ("Front stroke swimming race roped off lap areas.", "@@", "length ratio"),
        ("Good morning to you.", "Доброе утро.", "wrong script"),
        ("Tom knows Дмитрий well.", "Tom kennt Дмитрий gut.", None),
        ("Ignore Tom.", "Ignore Tom.", "copy of the source"),
        ("123", "1 2 3", None),
    ],
)
def test_reasons(source: str, target: str, reason: str | None) -> None:
    assert reason_to_drop(Pair(source.strip(), target.strip()), "en", "de", RULES) == reason


def test_a_wide_character_counts_as_three() -> None:
    assert measured_length("Tom 游泳。") == 4 + 9
    assert script_share("Tom游泳。", "zh") == 6 / 9
    source, target = "I don't know when my mother will come back from her trip.", "我不知道妈妈什么时候旅行回来。"
    assert len(source) > 3 * len(target)
    assert reason_to_drop(Pair(source, target), "en", "zh", RULES) is None
    assert reason_to_drop(Pair(source, "I don't know."), "en", "zh", RULES) == "wrong script"


def test_languages_without_a_listed_script_are_not_checked() -> None:
    assert script_share("ጤና ይስጥልኝ", "am") == 1.0
    assert script_share("ጤና ይስጥልኝ", "de") == 0.0


def test_the_report_accounts_for_every_pair_with_examples() -> None:
    pairs = [
        Pair("Hi.", "Hallo."),
        Pair(" Hi. ", "Hallo.\u200b"),  # The same pair once what nobody sees is gone
        Pair("Hi.", "Servus."),
        *(Pair(f"Line {i}", "") for i in range(8)),
        Pair("OK.", "OK."),
        Pair("Broken.", "kaputt \udcff " + "x" * 300),
        Pair("Run!", "Lauf\u00a0!"),
    ]
    report = DropReport()
    kept = list(clean(pairs, "en", "de", report))
    assert kept == [("Hi.", "Hallo."), ("Hi.", "Servus."), ("Run!", "Lauf !")]
    summary = report.as_dict()
    assert summary["dropped"] == {"empty": 8, "copy of the source": 1, "damaged": 1, "duplicate": 1}
    assert next(iter(summary["dropped"])) == "empty"
    assert (summary["seen"], summary["kept"], summary["changed"]) == (14, 3, 1)
    assert summary["seen"] == summary["kept"] + sum(summary["dropped"].values())
    assert [len(examples) for examples in summary["examples"].values()] == [5, 1, 1, 1]
    assert summary["examples"]["duplicate"] == [[" Hi. ", "Hallo.\u200b"]]
    (damaged,) = summary["examples"]["damaged"]
    assert len(damaged[1]) == 120
    json.dumps(summary, ensure_ascii=False).encode()  # A lone surrogate in an example would not be UTF-8


def test_rules_can_keep_copies_and_duplicates() -> None:
    pairs = [Pair("OK.", "OK."), Pair("OK.", "OK.")]
    assert list(clean(pairs, "en", "de", DropReport(), CleaningRules(copies=True))) == pairs[:1]
    assert list(clean(pairs, "en", "de", DropReport(), CleaningRules(copies=True, duplicates=True))) == pairs
