"""Translation in this process, with the options, values and errors of the client."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fuseq.client import make_request
from fuseq.translation import Translation, outcome_of
from serving.config import Settings
from serving.core.errors import FuseqError, ModelFailure
from serving.engine.translator import Translation as Decoded
from serving.metrics import Metrics
from serving.registry import Registry
from serving.rpc.messages import search_options, translated


class LocalTranslator:
    """A bundle opened in this process. Answers pass through the messages of the service, so they are the same.

    Args:
        bundle: folder of the bundle.
        timeout: seconds that one text may take.
        settings: limits and device; those of the table if left out.
    """

    def __init__(self, bundle: Path, *, timeout: float = 60.0, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._timeout = timeout
        self._registry = Registry(self._settings, Metrics())
        self._registry.open([bundle])
        self._model = self._registry.get()
        self._max_beam = min(self._settings.max_beam, self._model.engine.capacity)

    def submit(self, text: str, *, prefix: str = "", **options: Any) -> Future[Translation]:
        """Start translating one text; the future holds its translation or its error. See `fuseq.Client.submit`.

        Raises:
            FuseqError: the text or an option cannot be served.
        """
        request = make_request([(text, prefix)], options)  # type: ignore[arg-type]
        self._registry.get(request.model)
        translator = self._model.translator
        wanted = search_options(request.options, translator.default_options, self._max_beam)
        future: Future[Translation] = Future()
        future.set_running_or_notify_cancel()

        def finish(answer: Decoded | FuseqError) -> None:
            try:
                final: Translation | FuseqError
                final = answer if isinstance(answer, FuseqError) else outcome_of(translated(answer, wanted))
            except Exception as error:
                final = ModelFailure(f"the answer cannot be read: {error}")
            if isinstance(final, FuseqError):
                future.set_exception(final)
            else:
                future.set_result(final)

        translator.submit_text(
            text,
            wanted,
            on_done=finish,
            prefix_text=prefix,
            truncate=request.options.truncate,
            align=request.options.alignments,
            deadline=time.monotonic() + self._timeout,
        )
        return future

    def close(self) -> None:
        """Stop the engine."""
        self._registry.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
