"""Text in, translations out: the codecs of a bundle around its engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from serving.core.codecs import open_codec
from serving.core.errors import BundleError, DeadlineExceeded, FuseqError, InvalidInput, ModelFailure, Overloaded
from serving.core.manifest import Bundle
from serving.core.types import Hypothesis, SearchOptions, StopReason
from serving.engine.engine import Engine
from serving.engine.jobs import Job, Outcome, Result
from serving.engine.pool import Pool

PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Candidate:
    """One hypothesis as text."""

    text: str
    score: float
    tokens: tuple[str, ...]  # the target's pieces, forced prefix included
    stop_reason: StopReason
    alignment: NDArray[np.float32] | None = None  # (target, source): a row a token and one for the end symbol


@dataclass(frozen=True, slots=True)
class Translation:
    """What became of one text. `text` to `alignment` are those of the best hypothesis; times in seconds."""

    text: str
    score: float
    tokens: tuple[str, ...]
    stop_reason: StopReason
    truncated: bool  # whether the source was cut to the model's limit
    alignment: NDArray[np.float32] | None
    hypotheses: tuple[Candidate, ...]  # best first, as many as were asked for and found
    source_tokens: tuple[str, ...]  # pieces of the source, the end symbol included
    queue_seconds: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    align_seconds: float = 0.0
    total_seconds: float = 0.0
    steps: int = 0  # step calls that it took part in


@dataclass(frozen=True, slots=True)
class Prepared:
    """A text ready to be a job. `source` is empty where there is nothing to translate."""

    source: tuple[int, ...]  # ids, end symbol included
    prefix: tuple[int, ...]
    truncated: bool
    options: SearchOptions


OnTranslated = Callable[[Translation | FuseqError], None]


class Translator:
    """Translates texts with a bundle's engine. Every method may be called from any thread."""

    def __init__(self, bundle: Bundle, engine: Engine | Pool) -> None:
        """Open the codecs.

        Raises:
            BundleError: a codec is unknown or does not fit the manifest.
        """
        manifest = bundle.manifest
        self.engine = engine
        self.source_codec = open_codec(bundle, manifest.source_codec)
        self.target_codec = (
            self.source_codec
            if manifest.source_codec == manifest.target_codec
            else open_codec(bundle, manifest.target_codec)
        )
        for codec in (self.source_codec, self.target_codec):
            if codec.special != manifest.special_ids():
                raise BundleError(
                    f"bundle {manifest.name!r}: its codec has the control symbols {codec.special}, "
                    f"the manifest says {manifest.special_ids()}"
                )
        self._eos = self.source_codec.special.eos
        self._limit = manifest.limits.source
        self.default_options = manifest.search.options()

    def prepare(
        self,
        text: str,
        options: SearchOptions | None = None,
        prefix_text: str | None = None,
        truncate: bool = False,
    ) -> Prepared:
        """Text to ids.

        Args:
            options: the bundle's defaults for None.
            prefix_text: what the translation must begin with.
            truncate: cut a text that is over the model's limit, which counts the end symbol.

        Raises:
            InvalidInput: the text is over the limit and not to be cut, or is no valid Unicode.
        """
        ids = self.source_codec.encode(text) if text.strip() else []
        truncated = len(ids) + 1 > self._limit
        if truncated and not truncate:
            raise InvalidInput(
                f"the text has {len(ids) + 1} tokens with the end symbol, the model takes {self._limit}; "
                "shorten it, or ask for truncation"
            )
        source = (*ids[: self._limit - 1], self._eos) if ids else ()
        prefix = tuple(self.target_codec.encode(prefix_text)) if prefix_text and ids else ()
        return Prepared(source, prefix, truncated, options or self.default_options)

    def finish(self, prepared: Prepared, outcome: Outcome) -> Translation | FuseqError:
        """The engine's answer as text."""
        if isinstance(outcome, FuseqError):
            return outcome
        candidates = tuple(self._candidate(hypothesis) for hypothesis in outcome.hypotheses)
        return self._translation(prepared, candidates, outcome)

    def submit_text(
        self,
        text: str,
        options: SearchOptions | None = None,
        *,
        on_done: OnTranslated,
        prefix_text: str | None = None,
        truncate: bool = False,
        align: bool = False,
        deadline: float | None = None,
    ) -> Job | None:
        """Translate one text without waiting; returns the job, to be cancelled by `engine.cancel`.

        `on_done` is called once: from the engine's thread, or at once, with no job returned, where the text is
        empty or all whitespace.

        Raises:
            InvalidInput, Unsupported, Overloaded, Unavailable: as `prepare` and `Engine.submit`.
        """
        prepared = self.prepare(text, options, prefix_text, truncate)
        if not prepared.source:
            on_done(self.empty(prepared))
            return None

        def done(outcome: Outcome) -> None:
            try:
                answer = self.finish(prepared, outcome)
            except Exception as error:  # whatever a codec may do, the caller hears of it
                answer = ModelFailure(f"the output cannot be turned into text: {error}")
            on_done(answer)

        job = Job(prepared.source, prepared.options, done, prepared.prefix, align, deadline)
        self.engine.submit(job)
        return job

    def translate(
        self,
        texts: Sequence[str],
        options: SearchOptions | None = None,
        *,
        prefix_text: str | None = None,
        truncate: bool = False,
        align: bool = False,
        deadline: float | None = None,
    ) -> list[Translation | FuseqError]:
        """Translate texts and wait for all; a text's error stands in its place. However many, the queue suffices."""
        call = _Call(len(texts), window=max(1, self.engine.settings.queue // 2))
        for index, text in enumerate(texts):
            call.begin()
            answer = partial(call.done, index)
            while True:
                try:
                    self.submit_text(
                        text,
                        options,
                        on_done=answer,
                        prefix_text=prefix_text,
                        truncate=truncate,
                        align=align,
                        deadline=deadline,
                    )
                except Overloaded:  # others fill the queue
                    if deadline is None or time.monotonic() < deadline:
                        call.pause()
                        continue
                    answer(DeadlineExceeded("the deadline passed before there was room in the queue"))
                except FuseqError as error:
                    answer(error)
                break
        return call.wait()

    def empty(self, prepared: Prepared) -> Translation:
        """The translation of nothing."""
        candidate = Candidate("", 0.0, (), StopReason.EOS)
        return self._translation(prepared, (candidate,), None)

    def _candidate(self, hypothesis: Hypothesis) -> Candidate:
        return Candidate(
            self.target_codec.decode(hypothesis.tokens),
            hypothesis.score,
            tuple(self.target_codec.pieces(hypothesis.tokens)),
            hypothesis.stop_reason,
            hypothesis.alignment,
        )

    def _translation(self, prepared: Prepared, candidates: tuple[Candidate, ...], result: Result | None) -> Translation:
        best = candidates[0]
        return Translation(
            text=best.text,
            score=best.score,
            tokens=best.tokens,
            stop_reason=best.stop_reason,
            truncated=prepared.truncated,
            alignment=best.alignment,
            hypotheses=candidates,
            source_tokens=tuple(self.source_codec.pieces(prepared.source)),
            queue_seconds=result.queue_seconds if result else 0.0,
            encode_seconds=result.encode_seconds if result else 0.0,
            decode_seconds=result.decode_seconds if result else 0.0,
            align_seconds=result.align_seconds if result else 0.0,
            total_seconds=result.total_seconds if result else 0.0,
            steps=result.last_step - result.first_step + 1 if result else 0,
        )


class _Call:
    """The answers of one `translate` call, as they come in."""

    def __init__(self, count: int, window: int) -> None:
        self._answers: list[Translation | FuseqError | None] = [None] * count
        self._window = window
        self._pending = 0
        self._condition = threading.Condition()

    def begin(self) -> None:
        """Wait until fewer than `window` texts are on their way, and count one more."""
        with self._condition:
            self._condition.wait_for(lambda: self._pending < self._window)
            self._pending += 1

    def done(self, index: int, answer: Translation | FuseqError) -> None:
        """One text has its answer."""
        with self._condition:
            self._answers[index] = answer
            self._pending -= 1
            self._condition.notify()

    def pause(self) -> None:
        """Wait until a text has its answer, or a moment."""
        with self._condition:
            self._condition.wait(PAUSE_SECONDS)

    def wait(self) -> list[Translation | FuseqError]:
        """All answers, in order."""
        with self._condition:
            self._condition.wait_for(lambda: self._pending == 0)
        return [answer for answer in self._answers if answer is not None]
