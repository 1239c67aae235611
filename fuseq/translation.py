"""What a caller gets back: plain frozen values, made from the messages of the service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from serving.core.errors import (
    Cancelled,
    DeadlineExceeded,
    FuseqError,
    InvalidInput,
    NotFound,
    Overloaded,
    Unavailable,
    Unsupported,
)
from serving.core.types import StopReason

if TYPE_CHECKING:
    from fuseq.v1 import translator_pb2 as pb

STOP_REASONS = {1: StopReason.EOS, 2: StopReason.LENGTH, 3: StopReason.REPETITION}

# Number of a gRPC status code -> the error a caller catches.
ERRORS: dict[int, type[FuseqError]] = {
    1: Cancelled,
    3: InvalidInput,
    4: DeadlineExceeded,
    5: NotFound,
    8: Overloaded,
    12: Unsupported,
    14: Unavailable,
}


def error_of(code: int, message: str) -> FuseqError:
    """The error of the tree that stands for a gRPC status code."""
    return ERRORS.get(code, FuseqError)(message)


@dataclass(frozen=True, slots=True)
class Alignment:
    """How a translation attends to its source."""

    source: tuple[str, ...]  # pieces, the end symbol last
    target: tuple[str, ...]  # pieces, the end symbol last
    weights: NDArray[np.float32]  # (target, source); each row sums to 1

    def to_json(self) -> dict[str, Any]:
        """Plain lists; weights to six decimals."""
        rows = [[round(float(weight), 6) for weight in row] for row in self.weights]
        return {"source": list(self.source), "target": list(self.target), "weights": rows}


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One of the n best translations."""

    text: str
    score: float
    tokens: tuple[str, ...]
    stop_reason: StopReason
    alignment: Alignment | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "text": self.text,
            "score": self.score,
            "tokens": list(self.tokens),
            "stop_reason": str(self.stop_reason),
            "alignment": self.alignment.to_json() if self.alignment else None,
        }


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that an input spent in the server."""

    queue: float
    encode: float
    decode: float
    align: float
    total: float


@dataclass(frozen=True, slots=True)
class Translation:
    """The translation of one text."""

    text: str
    score: float  # sum of log-probabilities divided by the length penalty
    tokens: tuple[str, ...]  # target pieces
    stop_reason: StopReason
    truncated: bool  # whether the source was cut to the model's limit
    alignment: Alignment | None
    hypotheses: tuple[Hypothesis, ...]  # the n best, best first; the first is this translation
    timings: Timings

    def to_json(self) -> dict[str, Any]:
        """The fields that `fuseq translate --json` prints, without the input."""
        return {
            "text": self.text,
            "score": self.score,
            "tokens": list(self.tokens),
            "stop_reason": str(self.stop_reason),
            "truncated": self.truncated,
            "alignment": self.alignment.to_json() if self.alignment else None,
            "hypotheses": [hypothesis.to_json() for hypothesis in self.hypotheses],
        }


def _alignment(message: pb.Alignment) -> Alignment:
    source, target = tuple(message.source), tuple(message.target)
    weights = np.array(message.weights, dtype=np.float32).reshape(len(target), len(source))
    return Alignment(source, target, weights)


def _hypothesis(message: pb.Result | pb.Hypothesis) -> Hypothesis:
    return Hypothesis(
        text=message.text,
        score=message.score,
        tokens=tuple(message.tokens),
        stop_reason=STOP_REASONS[message.stop_reason],
        alignment=_alignment(message.alignment) if message.HasField("alignment") else None,
    )


def outcome_of(result: pb.Result) -> Translation | FuseqError:
    """The translation in `result`, or the error it reports."""
    if result.status.code != 0:
        return error_of(result.status.code, result.status.message)
    best = _hypothesis(result)
    t = result.timings
    return Translation(
        text=best.text,
        score=best.score,
        tokens=best.tokens,
        stop_reason=best.stop_reason,
        truncated=result.truncated,
        alignment=best.alignment,
        hypotheses=tuple(map(_hypothesis, result.hypotheses)) or (best,),
        timings=Timings(t.queue_seconds, t.encode_seconds, t.decode_seconds, t.align_seconds, t.total_seconds),
    )
