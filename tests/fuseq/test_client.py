"""The client: its errors, its retries, its deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from fuseq import Client, FuseqError, Translation
from fuseq.translation import ERRORS, error_of
from fuseq.v1 import translator_pb2 as pb
from fuseq.v1 import translator_pb2_grpc as stubs
from serving.core.errors import DeadlineExceeded, InvalidInput, NotFound, Overloaded, Unavailable
from serving.rpc.interceptors import CODES
from tests.serving.rpc.harness import Running, running

Behaviour = Callable[[int], grpc.StatusCode | None]


class Flaky(stubs.TranslatorServicer):
    """A server whose n-th call ends as `behaviour(n)` says; None is an answer."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.calls = 0

    def Translate(self, request: pb.TranslateRequest, context: grpc.ServicerContext) -> pb.TranslateResponse:
        self.calls += 1
        code = self.behaviour(self.calls)
        if code is not None:
            context.abort(code, "as told")
        result = pb.Result(status=pb.Status(), text="done", stop_reason=pb.STOP_REASON_EOS)
        return pb.TranslateResponse(results=[result] * len(request.inputs))


@contextmanager
def flaky(behaviour: Behaviour) -> Iterator[tuple[str, Flaky]]:
    servicer = Flaky(behaviour)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    stubs.add_TranslatorServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        server.stop(0).wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_unavailable_is_tried_again_until_it_is_not() -> None:
    first_two_fail: Behaviour = lambda n: grpc.StatusCode.UNAVAILABLE if n < 3 else None  # noqa: E731
    with flaky(first_two_fail) as (address, servicer), Client(address) as client:
        assert client.translate("a").text == "done"
        assert servicer.calls == 3


def test_attempts_are_counted_in_all() -> None:
    with flaky(lambda n: grpc.StatusCode.UNAVAILABLE) as (address, servicer):
        with Client(address, attempts=2) as client, pytest.raises(Unavailable, match="as told"):
            client.translate("a")
        assert servicer.calls == 2
        with Client(address, attempts=1) as client, pytest.raises(Unavailable):
            client.translate("a")
        assert servicer.calls == 3


def test_a_full_queue_is_tried_again_only_when_asked() -> None:
    first_fails: Behaviour = lambda n: grpc.StatusCode.RESOURCE_EXHAUSTED if n == 1 else None  # noqa: E731
    with flaky(first_fails) as (address, servicer):
        with Client(address) as client, pytest.raises(Overloaded):
            client.translate("a")
        servicer.calls = 0
        with Client(address, retry_overloaded=True) as client:
            assert client.translate("a").text == "done"
        assert servicer.calls == 2


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL])
def test_what_would_fail_again_is_not_tried_again(code: grpc.StatusCode) -> None:
    with flaky(lambda n: code) as (address, servicer), Client(address) as client:
        with pytest.raises(FuseqError, match="as told"):
            client.translate("a")
        assert servicer.calls == 1


def test_retries_end_with_the_deadline() -> None:
    with flaky(lambda n: grpc.StatusCode.UNAVAILABLE) as (address, _), Client(address, attempts=5) as client:
        begin = time.monotonic()
        with pytest.raises((DeadlineExceeded, Unavailable)):
            client.translate("a", timeout=0.3)
        assert time.monotonic() - begin < 2  # without the deadline the pauses alone may take longer


def test_a_deadline_is_kept_when_the_server_hangs() -> None:
    hang = threading.Event()

    def behaviour(number: int) -> None:
        hang.wait(20)

    with flaky(behaviour) as (address, _), Client(address) as client:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.translate("a", timeout=0.2)
        assert time.monotonic() - begin < 5
        hang.set()


def test_a_server_that_comes_up_late_is_waited_for(attending: Path) -> None:
    port = free_port()
    with Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(DeadlineExceeded, match="was not ready within"):
            client.wait_until_ready(0.2)
        threads = threading.Thread(target=client.wait_until_ready, args=(30,))
        threads.start()
        with running(attending, listen=f"127.0.0.1:{port}"):
            threads.join(30)
            assert not threads.is_alive()
            assert client.translate("a").tokens


def test_nobody_there_is_unavailable_in_one_line() -> None:
    with Client(f"127.0.0.1:{free_port()}", attempts=1) as client, pytest.raises(Unavailable) as caught:
        client.translate("a")
    assert "\n" not in str(caught.value)


def test_every_error_a_server_sends_has_its_class() -> None:
    for kind, code in CODES.items():
        assert type(error_of(code.value[0], "x")) is kind
    assert set(ERRORS) == {code.value[0] for code in CODES.values()}
    assert type(error_of(13, "x")) is FuseqError


def test_what_no_message_can_hold_is_invalid_input(shared: Running) -> None:
    with shared.client() as client:
        with pytest.raises(InvalidInput):
            client.translate("a lone surrogate \ud800")
        with pytest.raises(InvalidInput):
            client.translate("a", beam=-1)
        with pytest.raises(InvalidInput, match="beems"):
            client.translate("a", beems=3)  # type: ignore[call-overload]
        with pytest.raises(InvalidInput, match="2 texts but 1 prefixes"):
            client.translate(["a", "b"], prefix=["x"])
        with pytest.raises(InvalidInput, match="attempts 6"):
            Client(attempts=6)


def test_submit_gives_a_future_of_the_translation_or_its_error(shared: Running) -> None:
    with shared.client() as client:
        good, bad = client.submit("a cat", beam=2), client.submit("x", model="none")
        assert isinstance(good.result(), Translation)
        assert good.result().tokens == client.translate("a cat", beam=2).tokens
        with pytest.raises(NotFound):
            bad.result()
        with pytest.raises(InvalidInput):
            client.submit("z" * 500).result()


def test_one_client_serves_many_threads(shared: Running) -> None:
    with shared.client() as client, futures.ThreadPoolExecutor(8) as pool:
        texts = [f"text {number}" for number in range(40)]
        answers = list(pool.map(client.translate, texts))
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in client.translate(texts)]
