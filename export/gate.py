"""The quality gate: every precision translates the same development set as a server would, and is scored (case 42).

A precision that loses more BLEU against fp32 than allowed does not leave the house.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from export.bulk import translate_all
from export.errors import GateError
from export.subject import DevelopmentSet
from serving.core.errors import FuseqError
from serving.core.manifest import Bundle
from serving.engine.sessions import open_stages
from training.metrics import score

BEAM = 4


@dataclass(frozen=True, slots=True)
class Quality:
    """What a precision reaches on a development set."""

    bleu: float
    chrf: float
    details: dict[str, float | str]  # for the manifest


def measure_quality(
    bundle: Bundle, precision: str, dev: DevelopmentSet, progress: Callable[[int], object] = lambda done: None
) -> Quality:
    """Translate the set with the serving engine, as a request for a beam of 4 would have it, and score it.

    Raises:
        MissingDependency: sacreBLEU is not installed.
        GateError: a sentence could not be translated.
    """
    options = replace(bundle.manifest.search.options(), beam=BEAM)
    try:
        bulk = translate_all(bundle, open_stages(bundle, precision, "cpu"), dev.sources, options, progress)
    except FuseqError as error:
        raise GateError(f"{precision}: {error}") from error
    texts = [one.text for one in bulk.translations]
    scores = score(texts, [[reference] for reference in dev.references])
    details: dict[str, float | str] = {
        "bleu": round(scores.bleu, 2),
        "chrf": round(scores.chrf, 2),
        "bleu_signature": scores.bleu_signature,
        "chrf_signature": scores.chrf_signature,
        "set": dev.name,
        "sentences": float(len(dev.sources)),
        "beam": float(BEAM),
    }
    return Quality(scores.bleu, scores.chrf, details)


def check_loss(quality: Quality, reference: Quality, precision: str, allowed: float) -> dict[str, Any]:
    """What the precision loses against fp32, for the manifest.

    Raises:
        GateError: more than `allowed` BLEU.
    """
    loss = reference.bleu - quality.bleu
    if loss > allowed:
        raise GateError(
            f"{precision} reaches {quality.bleu:.2f} BLEU, fp32 {reference.bleu:.2f}: {loss:.2f} lost, "
            f"{allowed:g} allowed; export fp32 alone, or allow more with --max-loss"
        )
    return {**quality.details, "bleu_fp32": round(reference.bleu, 2), "bleu_loss": round(loss, 2)}
