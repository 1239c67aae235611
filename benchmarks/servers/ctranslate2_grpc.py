"""CTranslate2 in a plain grpc.aio server with a batching queue, as its users write one.

Whatever waits when a worker is free becomes its batch; nobody waits for a batch to fill. It speaks fuseq's protocol, so
that messages and generator cost both servers the same.
"""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from benchmarks.servers.text import open_translator, translate
from fuseq.v1 import translator_pb2 as pb
from fuseq.v1 import translator_pb2_grpc as stubs

Waiting = tuple[list[str], int, "asyncio.Future[list[str]]"]  # source, beam, where the answer goes


class Batcher:
    """Collects sources and hands them to CTranslate2's workers."""

    def __init__(self, translator: Any, spec: dict[str, Any]) -> None:
        self._translator, self._spec = translator, spec
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._held: list[Waiting] = []  # taken from the queue, of another beam than the batch that was made
        workers = spec["inter"]
        self._threads = ThreadPoolExecutor(workers)
        self._tasks = [asyncio.create_task(self._work()) for _ in range(workers)]

    async def translate(self, source: list[str], beam: int) -> list[str]:
        """The tokens of one source."""
        future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((source, beam, future))
        return await future

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [self._held.pop() if self._held else await self._queue.get()]
            while len(batch) < self._spec["max_batch"] and not self._queue.empty():
                item = self._queue.get_nowait()
                (batch if item[1] == batch[0][1] else self._held).append(item)
            sources, beam = [source for source, _, _ in batch], batch[0][1]
            try:
                outputs = await loop.run_in_executor(
                    self._threads, translate, self._translator, sources, beam, self._spec
                )
            except Exception as error:
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, _, future), output in zip(batch, outputs, strict=True):
                if not future.done():  # the caller may have left
                    future.set_result(output)


class Servicer(stubs.TranslatorServicer):
    """Translate, and nothing else."""

    def __init__(self, spec: dict[str, Any]) -> None:
        translator, self._tokenizer = open_translator(spec)
        self._batcher = Batcher(translator, spec)

    async def Translate(self, request: Any, context: Any) -> Any:
        """Every input of the call, together."""
        beam = request.options.beam or 1
        sources = [self._tokenizer.encode(item.text) for item in request.inputs]
        outputs = await asyncio.gather(*(self._batcher.translate(source, beam) for source in sources))
        texts = [self._tokenizer.decode(output) for output in outputs]
        return pb.TranslateResponse(results=[pb.Result(text=text) for text in texts])


async def serve(spec: dict[str, Any]) -> None:
    """Until the process is ended."""
    server = grpc.aio.server()
    stubs.add_TranslatorServicer_to_server(Servicer(spec), server)
    server.add_insecure_port(f"127.0.0.1:{spec['port']}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
