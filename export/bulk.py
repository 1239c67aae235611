"""Many sentences through the serving engine at once, every processor busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from serving.core.errors import FuseqError
from serving.core.manifest import Bundle
from serving.core.types import SearchOptions
from serving.engine.pool import Pool, share_out
from serving.engine.sessions import Stages
from serving.engine.settings import EngineSettings
from serving.engine.translator import Translation, Translator

Watch = Callable[[int], object]
"""Told how many sentences were just done."""


@dataclass(frozen=True, slots=True)
class Bulk:
    """Sentences translated together."""

    translations: list[Translation]
    seconds: float  # from the first one in to the last one out, the engines being warm
    workers: int


def translate_all(
    bundle: Bundle, stages: Stages, sources: Sequence[str], options: SearchOptions, watch: Watch = lambda done: None
) -> Bulk:
    """Translate the sentences; one over the model's limit is cut.

    Raises:
        FuseqError: a sentence could not be translated; the message names it.
    """
    workers, _ = share_out()
    pool = Pool(bundle, stages, EngineSettings(), workers=workers)
    flight = _Flight(Translator(bundle, pool), options, watch)
    with pool:
        begin = time.perf_counter()
        translations = flight.run(sources)
        seconds = time.perf_counter() - begin
    return Bulk(translations, seconds, workers)


class _Flight:
    """Keeps the engines' queue filled until every sentence has its answer."""

    def __init__(self, translator: Translator, options: SearchOptions, watch: Watch) -> None:
        self._translator, self._options, self._watch = translator, options, watch
        self._room = threading.Semaphore(max(1, translator.engine.settings.queue // 2))
        self._answers: dict[int, Translation | FuseqError] = {}
        self._done = threading.Condition()

    def run(self, sources: Sequence[str]) -> list[Translation]:
        """The translations, in order."""
        for index, text in enumerate(sources):
            self._room.acquire()
            self._translator.submit_text(text, self._options, on_done=partial(self._take, index), truncate=True)
        with self._done:
            self._done.wait_for(lambda: len(self._answers) == len(sources))
        found: list[Translation] = []
        for index in range(len(sources)):
            answer = self._answers[index]
            if isinstance(answer, FuseqError):
                raise type(answer)(f"sentence {index + 1} cannot be translated: {answer}")
            found.append(answer)
        return found

    def _take(self, index: int, answer: Translation | FuseqError) -> None:
        self._room.release()
        with self._done:
            self._answers[index] = answer
            self._done.notify()
        self._watch(1)
