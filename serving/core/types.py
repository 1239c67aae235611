"""Plain values that training, export and serving agree on."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class StopReason(enum.StrEnum):
    """Why a hypothesis ended."""

    EOS = "eos"
    LENGTH = "length"
    REPETITION = "repetition"


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids of the control symbols of a target vocabulary."""

    pad: int = 0
    bos: int = 1
    eos: int = 2
    unk: int = 3


class LengthNormalisation(enum.StrEnum):
    """What the sum of the log-probabilities of n tokens is divided by, a being the length penalty's exponent."""

    GNMT = "gnmt"  # ((5 + n) / 6) ** a (Wu et al. 2016, eq. 14)
    POWER = "power"  # n ** a, as in Hugging Face's generate


@dataclass(frozen=True, slots=True)
class SearchRules:
    """What a model asks of every search, whatever the request. The defaults are those of models trained here."""

    length_normalisation: LengthNormalisation = LengthNormalisation.GNMT
    end_at_limit: bool = False  # where an output is cut, the last token it may have is the end symbol, at no cost
    banned: frozenset[int] = frozenset()  # ids that are never generated, though they have a share of the likelihood


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How one source is decoded.

    At most `max_length_ratio * source_tokens + max_length_margin` tokens are generated (the source counts its
    end symbol), and never more than the model's own limit. A score is the sum of the log-probabilities of the
    generated tokens, the end symbol included, divided by a power of their number, `length_penalty` being the exponent
    (see `LengthNormalisation`).
    """

    beam: int = 1  # rows a group searches with; 1 is greedy
    nbest: int = 1  # hypotheses returned, best first; at most `beam`
    length_penalty: float = 0.6
    max_length_ratio: float = 2.0
    max_length_margin: int = 12
    stop_repetition: bool = True  # see serving.core.search.repeated_tail for the rule
    forced_length: int | None = None  # exactly so many tokens, the end symbol never chosen (for measurements)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One finished output: `tokens` holds the forced prefix and what was generated, without control symbols."""

    tokens: tuple[int, ...]
    score: float
    log_probability: float
    stop_reason: StopReason
    alignment: NDArray[np.float32] | None = None  # (target, source): a row a token and one for the end symbol
