"""Scores of translations, and signs that a model does not translate at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import sacrebleu

from serving.core.errors import FuseqError


class DegenerateOutputs(FuseqError):
    """A model whose outputs are empty, copied from the source, or nearly all the same."""


@dataclass(frozen=True, slots=True)
class Scores:
    """BLEU and chrF as sacreBLEU computes them, with its signatures."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str

    def as_dict(self) -> dict[str, float | str]:
        """For logs and manifests."""
        return asdict(self)


def score(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """Corpus BLEU and chrF (sacreBLEU, default settings, cased).

    Args:
        hypotheses: one a sentence.
        references: for each sentence one or more references; numbers may differ.
    """
    most = max(len(one) for one in references)
    streams = [[one[i] if i < len(one) else None for one in references] for i in range(most)]
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    b = bleu.corpus_score(hypotheses, streams)
    c = chrf.corpus_score(hypotheses, streams)
    return Scores(b.score, c.score, str(bleu.get_signature()), str(chrf.get_signature()))


@dataclass(frozen=True, slots=True)
class Faults:
    """Shares (0 to 1) of outputs that are no translations."""

    empty: float
    copied: float  # of sources with more than three words
    most_common: float  # share of the commonest output among sources that differ

    def check(self) -> None:
        """Raise where the outputs as a whole are degenerate.

        Raises:
            DegenerateOutputs: over 20% empty, 30% copied, or 30% the same.
        """
        if self.empty > 0.2:
            raise DegenerateOutputs(f"{self.empty:.0%} of the development outputs are empty; check data and rates")
        if self.copied > 0.3:
            raise DegenerateOutputs(f"{self.copied:.0%} of the development outputs copy the source; check the languages")
        if self.most_common > 0.3:
            raise DegenerateOutputs(f"{self.most_common:.0%} of the development outputs are the same; the rate is too high")


def find_faults(sources: Sequence[str], hypotheses: Sequence[str]) -> Faults:
    """Shares of degenerate outputs."""
    texts = [text.strip() for text in hypotheses]
    long = [(s.strip(), t) for s, t in zip(sources, texts, strict=True) if len(s.split()) > 3]
    commonest = Counter(text for text in texts if text).most_common(1)
    return Faults(
        empty=sum(not text for text in texts) / len(texts),
        copied=sum(s == t for s, t in long) / max(1, len(long)),
        most_common=commonest[0][1] / len(texts) if commonest else 0.0,
    )
