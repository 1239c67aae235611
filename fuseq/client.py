"""The synchronous client of the service."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack, overload

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fuseq.translation import Translation, error_of, outcome_of
from fuseq.v1 import translator_pb2 as pb
from fuseq.v1 import translator_pb2_grpc as stubs
from serving.core.errors import DeadlineExceeded, FuseqError, InvalidInput

SERVICE = "fuseq.v1.Translator"
MAX_ATTEMPTS = 5  # gRPC allows no more


class TranslateOptions(TypedDict, total=False):
    """Options of a translation; what is left out is the model's default."""

    model: str  # name of the model; the server's default if left out
    beam: int  # rows that search in parallel; 1 is greedy
    nbest: int  # hypotheses wanted, at most `beam`
    length_penalty: float  # exponent of the length penalty
    max_length_ratio: float  # at most ratio * source tokens + margin tokens are generated
    max_length_margin: int
    alignments: bool  # return how the target attends to the source
    truncate: bool  # cut a text over the model's limit instead of refusing it
    forced_length: int  # exactly so many tokens
    allow_repetition: bool  # do not cut an output that repeats itself


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that the server holds."""

    name: str
    version: str
    source_language: str
    target_language: str
    architecture: str
    precision: str
    device: str
    max_source_tokens: int
    max_target_tokens: int
    alignments: bool
    licence: str
    attribution: str


def _service_config(attempts: int, retry_overloaded: bool) -> str:
    """gRPC's retry policy: exponential backoff with jitter, never past the deadline of the call."""
    method: dict[str, Any] = {"name": [{"service": SERVICE}]}
    if attempts > 1:
        method["retryPolicy"] = {
            "maxAttempts": attempts,
            "initialBackoff": "0.1s",
            "maxBackoff": "2s",
            "backoffMultiplier": 3,
            "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"] if retry_overloaded else ["UNAVAILABLE"],
        }
    return json.dumps({"methodConfig": [method]})


def make_request(inputs: Iterable[tuple[str, str]], options: TranslateOptions) -> pb.TranslateRequest:
    """The message for (text, prefix) pairs.

    Raises:
        InvalidInput: a text is no valid Unicode, or an option has a value that no message can hold.
    """
    fields: dict[str, Any] = dict(options)
    model = fields.pop("model", "")
    try:
        pairs = [pb.Input(text=text, prefix=prefix) for text, prefix in inputs]
        return pb.TranslateRequest(model=model, inputs=pairs, options=pb.Options(**fields))
    except (ValueError, TypeError) as error:  # lone surrogates, a negative beam, an unknown option
        raise InvalidInput(" ".join(str(error).split())) from None


def _failure(error: grpc.RpcError) -> FuseqError:
    """The error of the tree for a failed call."""
    return error_of(error.code().value[0], error.details() or error.code().name)


class Client:
    """Translates over gRPC.

    Args:
        target: "host:port" of the server.
        timeout: seconds that a call may take, retries included, unless the call names its own.
        attempts: how often a call is tried in all while the server is unreachable, starting or draining
            (UNAVAILABLE), with exponential backoff; 1 turns retries off, 5 is the most.
        retry_overloaded: whether a full queue (RESOURCE_EXHAUSTED) is tried again likewise. Off by default: a
            caller that can wait should say so, for retries add to the load that caused the refusal.
        credentials: for TLS; plain text without.

    Calls raise the errors of `serving.core.errors`: InvalidInput, NotFound, Overloaded, DeadlineExceeded,
    Unavailable and so on, all of them FuseqError. A client may be used from several threads.
    """

    def __init__(
        self,
        target: str = "localhost:50051",
        *,
        timeout: float = 60.0,
        attempts: int = 4,
        retry_overloaded: bool = False,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        if not 1 <= attempts <= MAX_ATTEMPTS:
            raise InvalidInput(f"attempts {attempts}: must be 1 to {MAX_ATTEMPTS}")
        self.target = target
        self.timeout = timeout
        options = [
            ("grpc.service_config", _service_config(attempts, retry_overloaded)),
            ("grpc.enable_retries", int(attempts > 1)),
            ("grpc.max_receive_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=options)
        self._stub = stubs.TranslatorStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    @overload
    def translate(  # type: ignore[overload-overlap]
        self, text: str, *, prefix: str = ..., timeout: float | None = ..., **options: Unpack[TranslateOptions]
    ) -> Translation: ...
    @overload
    def translate(
        self,
        text: Sequence[str],
        *,
        prefix: str | Sequence[str] = ...,
        timeout: float | None = ...,
        errors: Literal["raise"] = ...,
        **options: Unpack[TranslateOptions],
    ) -> list[Translation]: ...
    @overload
    def translate(
        self,
        text: Sequence[str],
        *,
        prefix: str | Sequence[str] = ...,
        timeout: float | None = ...,
        errors: Literal["return"],
        **options: Unpack[TranslateOptions],
    ) -> list[Translation | FuseqError]: ...
    def translate(
        self,
        text: str | Sequence[str],
        *,
        prefix: str | Sequence[str] = "",
        timeout: float | None = None,
        errors: Literal["raise", "return"] = "raise",
        **options: Unpack[TranslateOptions],
    ) -> Any:
        """Translate one text or a list of texts in one call.

        Args:
            text: a text, or a list of them; a list gives a list of the same order and length.
            prefix: how each translation must begin; a list gives each text its own.
            timeout: seconds this call may take, retries included.
            errors: what becomes of a text that fails while others do not: "raise" its error, or "return" it in
                its place.
        """
        texts = [text] if isinstance(text, str) else list(text)
        prefixes = [prefix] * len(texts) if isinstance(prefix, str) else list(prefix)
        if len(prefixes) != len(texts):
            raise InvalidInput(f"{len(texts)} texts but {len(prefixes)} prefixes: give one for each, or one for all")
        request = make_request(zip(texts, prefixes, strict=True), options)
        try:
            response = self._stub.Translate(request, timeout=self.timeout if timeout is None else timeout)
        except grpc.RpcError as error:
            raise _failure(error) from None
        outcomes = [outcome_of(result) for result in response.results]
        if errors == "raise":
            for outcome in outcomes:
                if isinstance(outcome, FuseqError):
                    raise outcome
        return outcomes[0] if isinstance(text, str) else outcomes

    def submit(
        self, text: str, *, prefix: str = "", timeout: float | None = None, **options: Unpack[TranslateOptions]
    ) -> Future[Translation]:
        """Start translating one text; the future holds its translation or its error. Cancelling it does nothing."""
        future: Future[Translation] = Future()
        future.set_running_or_notify_cancel()

        def finish(call: Any) -> None:
            try:
                outcome = outcome_of(call.result().results[0])
            except grpc.RpcError as error:
                outcome = _failure(error)
            except Exception as error:
                future.set_exception(error)
                return
            if isinstance(outcome, FuseqError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        request = make_request([(text, prefix)], options)
        self._stub.Translate.future(request, timeout=self.timeout if timeout is None else timeout).add_done_callback(
            finish
        )
        return future

    def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """The models that the server holds, the default one first."""
        try:
            response = self._stub.ListModels(
                pb.ListModelsRequest(), timeout=self.timeout if timeout is None else timeout
            )
        except grpc.RpcError as error:
            raise _failure(error) from None
        names = ModelInfo.__dataclass_fields__
        return [ModelInfo(**{name: getattr(model, name) for name in names}) for model in response.models]

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Return as soon as the server is up and warm.

        Raises:
            DeadlineExceeded: it was not within `timeout` seconds.
        """
        end = time.monotonic() + timeout
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        while (left := end - time.monotonic()) > 0:
            try:
                answer = self._health.Check(request, timeout=min(left, 2.0), wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass
            time.sleep(min(0.05, max(0.0, end - time.monotonic())))
        raise DeadlineExceeded(f"{self.target} was not ready within {timeout:g} s")

    def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
