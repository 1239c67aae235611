"""What every call passes through: the gate, the count of calls by outcome, and the error tree as status codes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

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
from serving.metrics import Metrics

log = logging.getLogger("fuseq.rpc")

PACKAGE = "/fuseq.v1."
COUNTED = "/fuseq.v1.Translator/Translate"
LONGEST_DETAILS = 300
# A caller's own clock started before ours: a call given up this close to its deadline was given up for it.
DEADLINE_SLACK = 0.05

CODES: dict[type[FuseqError], grpc.StatusCode] = {
    InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Unsupported: grpc.StatusCode.UNIMPLEMENTED,
}

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour = Callable[[Any, Context], Awaitable[Any]]


class Undecodable(NamedTuple):
    """A request whose bytes are no valid message."""

    data: bytes


def status_of(error: BaseException) -> grpc.StatusCode:
    """The status code of an error; whatever is not on the tree's list is INTERNAL."""
    for kind in type(error).__mro__:
        if kind in CODES:
            return CODES[kind]
    return grpc.StatusCode.INTERNAL


def details_of(error: BaseException) -> str:
    """One short line of valid UTF-8 for people; faults of ours tell outsiders nothing."""
    if status_of(error) is grpc.StatusCode.INTERNAL:
        return "internal error; the server's log has more"
    line = " ".join(str(error).encode("utf-8", "backslashreplace").decode("utf-8").split())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= LONGEST_DETAILS else line[: LONGEST_DETAILS - 1] + "…"


def given_up(context: Context) -> FuseqError:
    """Why a call was cancelled from outside: its deadline passed, or the caller left."""
    left = context.time_remaining()
    if left is not None and left <= DEADLINE_SLACK:
        return DeadlineExceeded("the deadline passed")
    return Cancelled("the caller gave the call up")


class Gate:
    """Whether calls are let in, and how many are inside."""

    def __init__(self) -> None:
        self.closed: str | None = "the server is starting; try again soon"
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def open(self) -> None:
        """Let calls in."""
        self.closed = None

    def close(self, reason: str) -> None:
        """Refuse new calls with UNAVAILABLE."""
        self.closed = reason

    def enter(self) -> None:
        """Count a call in.

        Raises:
            Unavailable: the gate is closed.
        """
        if self.closed is not None:
            raise Unavailable(self.closed)
        self._inside += 1
        self._empty.clear()

    def leave(self) -> None:
        """Count a call out."""
        self._inside -= 1
        if self._inside == 0:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Wait until no call is inside."""
        await self._empty.wait()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of package fuseq.v1; health checks pass untouched."""

    def __init__(self, metrics: Metrics, gate: Gate) -> None:
        self._metrics = metrics
        self._gate = gate
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        if method in self._wrapped:
            return self._wrapped[method]
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith(PACKAGE):
            return handler
        behaviour = cast(Behaviour, handler.unary_unary)
        wrapped = grpc.unary_unary_rpc_method_handler(
            self._guarded(behaviour, counted=method == COUNTED),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        self._wrapped[method] = wrapped
        return wrapped

    def _guarded(self, behaviour: Behaviour, counted: bool) -> Behaviour:
        """Errors of the tree end a call with their status, others are logged and INTERNAL.

        A call that is counted is counted in once and out once, whatever becomes of it, and out before its caller
        hears of it.
        """

        async def guarded(request: Any, context: Context) -> Any:
            error: BaseException | None = None
            if counted:
                self._metrics.request_started()
            try:
                return await self._let_in(behaviour, request, context)
            except FuseqError as failure:
                error = failure
                if status_of(failure) is grpc.StatusCode.INTERNAL:
                    log.error("a call failed: %s", failure)
            except Exception as failure:
                error = failure
                log.exception("a call failed")
            except BaseException:  # asyncio.CancelledError
                error = given_up(context)
                raise
            finally:
                if counted:
                    self._metrics.request_ended(error)
            return await context.abort(status_of(error), details_of(error))

        return guarded

    async def _let_in(self, behaviour: Behaviour, request: Any, context: Context) -> Any:
        self._gate.enter()
        try:
            return await behaviour(request, context)
        finally:
            self._gate.leave()


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """A deserializer that hands undecodable bytes on, so that they end in a clean status."""
    assert deserialize is not None

    def tolerant(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return Undecodable(data)

    return tolerant
