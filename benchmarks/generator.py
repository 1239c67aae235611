"""The load generator's process: one JSON object in on standard input, one out on standard output.

It speaks fuseq's gRPC protocol, which the plain CTranslate2 server has too, and HTTP with JSON for LitServe.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import openloop
from benchmarks.openloop import OK, Call

CHANNELS = 4  # connections, as several users have
METHOD = "/fuseq.v1.Translator/Translate"


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and to whom."""

    address: str  # "grpc://host:port" or "http://host:port/path"
    texts: tuple[str, ...]  # calls take them in turn
    seconds: float
    rate: float = 0.0  # calls a second, open loop; 0 for a closed one
    in_flight: int = 0  # of a closed loop
    inputs: int = 1  # texts in a call
    beam: int = 1
    forced: int = 0
    limit: int = 128  # most tokens of an output
    warm_up: float = 0.0  # seconds of `seconds` that are not counted
    timeout: float = 10.0  # seconds after which a user gives up
    seed: int = 0


def batches(load: Load) -> list[list[str]]:
    """The texts of call 0, 1, ...; calls beyond begin anew."""
    texts, size = list(load.texts), load.inputs
    return [[texts[(first + i) % len(texts)] for i in range(size)] for first in range(0, max(len(texts), size), size)]


def grpc_messages(load: Load) -> list[bytes]:
    """The calls, serialized beforehand: the generator shares its processors with the server."""
    from fuseq.v1 import translator_pb2 as pb

    options = pb.Options(beam=load.beam, length_penalty=0.0, allow_repetition=True)
    options.max_length_ratio, options.max_length_margin = 0.0, load.limit
    if load.forced:
        options.forced_length = load.forced
    return [
        pb.TranslateRequest(inputs=[pb.Input(text=text) for text in texts], options=options).SerializeToString()
        for texts in batches(load)
    ]


def http_messages(load: Load) -> list[bytes]:
    """The same as JSON; how long outputs may be is LitServe's own setting."""
    return [json.dumps({"texts": texts, "beam": load.beam}).encode() for texts in batches(load)]


async def _grpc_call(load: Load, stack: AsyncExitStack) -> Call:
    import grpc

    from fuseq.v1 import translator_pb2 as pb

    target = load.address.removeprefix("grpc://")
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    methods: list[Any] = []
    for _ in range(CHANNELS):
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(target, options=options))
        methods.append(channel.unary_unary(METHOD))  # bytes in and out
    messages = grpc_messages(load)

    async def call(number: int) -> str:
        try:
            answer = await methods[number % CHANNELS](messages[number % len(messages)], timeout=load.timeout)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        if number % 50 == 0:  # looked into now and then: a server that answers nonsense is not fast
            results = pb.TranslateResponse.FromString(answer).results
            if len(results) != load.inputs or any(result.status.code for result in results):
                return "wrong"
        return OK

    return call


async def _http_call(load: Load, stack: AsyncExitStack) -> Call:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=load.timeout)
    session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
    bodies = http_messages(load)
    headers = {"Content-Type": "application/json"}

    async def call(number: int) -> str:
        async with session.post(load.address, data=bodies[number % len(bodies)], headers=headers) as answer:
            body = await answer.read()
            if answer.status != 200:
                return f"HTTP {answer.status}"
        if number % 50 == 0 and len(json.loads(body)["texts"]) != load.inputs:
            return "wrong"
        return OK

    return call


async def generate(load: Load) -> dict[str, Any]:
    """Run the load; the outcome as JSON."""
    async with AsyncExitStack() as stack:
        call = await (_grpc_call if load.address.startswith("grpc:") else _http_call)(load, stack)
        gc.collect()
        gc.disable()  # a collection would look like a slow server
        if load.rate:
            due = openloop.arrivals(load.rate, load.seconds, load.seed)
            outcome = await openloop.run(call, due, warm_up=load.warm_up)
        else:
            outcome = await openloop.closed(call, load.in_flight, load.seconds)
    return outcome.to_json()


def send(load: Load) -> dict[str, Any]:
    """Run the load in a process of its own.

    Raises:
        FuseqError: the generator failed.
    """
    from benchmarks.records import ROOT
    from serving.core.errors import FuseqError

    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.generator"], input=json.dumps(asdict(load)), capture_output=True,
        text=True, cwd=ROOT, timeout=load.seconds + load.timeout + 120,
    )  # fmt: skip
    if done.returncode:
        raise FuseqError(f"the load generator failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """One load."""
    given = json.load(sys.stdin)
    load = Load(**{**given, "texts": tuple(given["texts"])})
    json.dump(asyncio.run(generate(load)), sys.stdout)


if __name__ == "__main__":
    main()
