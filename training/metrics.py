"""Scores of translations, and signs that a model does not translate at all."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from serving.core.errors import FuseqError, InvalidInput, MissingDependency

MOST_EMPTY, MOST_COPIED, MOST_ALIKE = 0.2, 0.3, 0.3


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

    Raises:
        InvalidInput: there are no sentences, or one has no reference.
        MissingDependency: sacreBLEU is not installed.
    """
    try:
        import sacrebleu  # here, so that a serving installation can show the help of what would need it
    except ImportError as error:
        raise MissingDependency("scores need sacreBLEU; run: pip install 'fuseq[train]'") from error
    if not hypotheses or len(hypotheses) != len(references) or not all(references):
        raise InvalidInput(f"{len(hypotheses)} outputs and {len(references)} lists of references cannot be scored")
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
    copied: float  # of sources that are more than a name
    most_common: float  # outputs of different sources that are the commonest one

    def check(self) -> None:
        """Refuse outputs that as a whole are degenerate.

        Raises:
            DegenerateOutputs: over 20% empty, 30% copied, or 30% the same.
        """
        for share, most, what, remedy in (
            (self.empty, MOST_EMPTY, "are empty", "check data and rates"),
            (self.copied, MOST_COPIED, "copy the source", "check the languages of the data"),
            (self.most_common, MOST_ALIKE, "are the same", "check the data, or lower optimiser.rate"),
        ):
            if share > most:
                raise DegenerateOutputs(f"{share:.0%} of the development outputs {what}; {remedy}")


def _more_than_a_name(source: str) -> bool:
    """Over three words, twenty characters or, in scripts without spaces, five ideographs or kana."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in source)
    return len(source.split()) > 3 or len(source) > 20 or wide > 5


def find_faults(sources: Sequence[str], hypotheses: Sequence[str]) -> Faults:
    """Shares of degenerate outputs."""
    texts = [text.strip() for text in hypotheses]
    long = [(s, t) for s, t in zip(map(str.strip, sources), texts, strict=True) if _more_than_a_name(s)]
    by_source = dict(zip(sources, texts, strict=True))
    commonest = Counter(text for text in by_source.values() if text).most_common(1)
    return Faults(
        empty=sum(not text for text in texts) / max(1, len(texts)),
        copied=sum(s == t for s, t in long) / max(1, len(long)),
        # What stands once is the same as nothing: a handful of sentences is not degenerate.
        most_common=commonest[0][1] / len(by_source) if commonest and commonest[0][1] > 1 else 0.0,
    )
