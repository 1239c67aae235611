"""The methods of the service: messages in, jobs for the engine, messages out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fuseq.v1 import translator_pb2 as pb
from fuseq.v1 import translator_pb2_grpc as stubs
from serving.config import Settings
from serving.core.errors import Cancelled, DeadlineExceeded, FuseqError, InvalidInput, Overloaded, Unavailable
from serving.core.types import SearchOptions
from serving.engine.jobs import Job, Outcome
from serving.engine.translator import Prepared, Translation
from serving.metrics import Metrics
from serving.registry import Model, Registry
from serving.rpc.interceptors import Context, Undecodable, given_up
from serving.rpc.messages import failed, salvage, search_options, translated

# Texts and prefixes of more characters in all are turned into ids by a thread: other calls and health checks go on.
LONG_REQUEST = 20_000


class Mailbox:
    """Wakes calls from engine threads: any number of them costs the event loop one wake-up."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    def wake(self, waiter: asyncio.Future[None]) -> None:
        """Complete the waiter soon. From any thread."""
        self._ready.append(waiter)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False  # first: whoever comes from now on schedules anew
        while self._ready:
            waiter = self._ready.popleft()
            if not waiter.done():
                waiter.set_result(None)


class Answers:
    """The outcomes of one call's jobs, as the engine hands them in."""

    def __init__(self, mailbox: Mailbox, count: int) -> None:
        self.outcomes: list[Outcome | None] = [None] * count
        self._mailbox = mailbox
        self._left = count
        self._lock = threading.Lock()
        self._waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, index: int, outcome: Outcome) -> None:
        """One job is done. From any thread."""
        with self._lock:
            self.outcomes[index] = outcome
            self._left -= 1
            last = not self._left
        if last:
            self._mailbox.wake(self._waiter)

    async def wait(self) -> None:
        """Until every job is done."""
        if self.outcomes:
            await self._waiter


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for, checked and in plain values."""

    model: Model
    options: SearchOptions
    alignments: bool
    deadline: float | None  # of time.monotonic()
    inputs: list[Prepared | FuseqError]


class TranslatorServicer(stubs.TranslatorServicer):
    """Translate and ListModels."""

    def __init__(self, registry: Registry, settings: Settings, metrics: Metrics) -> None:
        self._registry = registry
        self._metrics = metrics
        self._max_inputs = min(settings.max_inputs, settings.queue)
        self._max_beam = settings.max_beam
        self._mailbox: Mailbox | None = None

    async def Translate(self, request: pb.TranslateRequest | Undecodable, context: Context) -> pb.TranslateResponse:
        """See the protocol."""
        bad: dict[int, InvalidInput] = {}
        if isinstance(request, Undecodable):
            request, bad = salvage(request.data)
        asked = await self._read(request, bad, context)
        self._metrics.inputs_started(len(asked.inputs))
        outcomes: list[Translation | FuseqError] = [Cancelled("the call was given up")] * len(asked.inputs)
        try:
            outcomes = await self._decode(asked)
        except FuseqError as error:
            outcomes = [error] * len(asked.inputs)
            raise
        except asyncio.CancelledError:
            outcomes = [given_up(context)] * len(asked.inputs)
            raise
        finally:
            self._count(asked, outcomes)
        # A call whose deadline passed, or that the server could not finish, has failed as a whole.
        for outcome in outcomes:
            if isinstance(outcome, DeadlineExceeded | Unavailable):
                raise outcome
        manifest = asked.model.manifest
        results = [
            failed(outcome) if isinstance(outcome, FuseqError) else translated(outcome, asked.options)
            for outcome in outcomes
        ]
        return pb.TranslateResponse(results=results, model=manifest.name, version=manifest.version)

    async def _read(self, request: pb.TranslateRequest, bad: dict[int, InvalidInput], context: Context) -> Asked:
        """Check the request as a whole and turn its texts into ids.

        Raises:
            InvalidInput, NotFound: the request as a whole is bad.
        """
        model = self._registry.get(request.model)
        options = search_options(request.options, model.translator.default_options, self._widest(model))
        if len(request.inputs) > self._max_inputs:
            raise InvalidInput(f"{len(request.inputs)} inputs; a request may hold {self._max_inputs}: send several")
        left = context.time_remaining()
        deadline = None if left is None else time.monotonic() + left
        prepare = partial(_prepare_all, model, request.inputs, options, request.options.truncate, bad)
        if sum(len(item.text) + len(item.prefix) for item in request.inputs) > LONG_REQUEST:
            inputs = await asyncio.get_running_loop().run_in_executor(None, prepare)
        else:
            inputs = prepare()
        return Asked(model, options, request.options.alignments, deadline, inputs)

    async def _decode(self, asked: Asked) -> list[Translation | FuseqError]:
        """Run what there is to run.

        Raises:
            Overloaded: the queue has no room for all of it; nothing was started.
        """
        if self._mailbox is None:
            self._mailbox = Mailbox()
        model = asked.model
        outcomes: list[Translation | FuseqError | None] = [
            item if isinstance(item, FuseqError) else None if item.source else model.translator.empty(item)
            for item in asked.inputs
        ]
        running = [index for index, outcome in enumerate(outcomes) if outcome is None]
        answers = Answers(self._mailbox, len(running))
        jobs: list[Job] = []
        try:
            self._submit(asked, running, answers, jobs)
            await answers.wait()
        finally:
            for job, answer in zip(jobs, answers.outcomes, strict=False):
                if answer is None:
                    model.engine.cancel(job)
        for index, answer in zip(running, answers.outcomes, strict=True):
            item = asked.inputs[index]
            assert answer is not None
            assert isinstance(item, Prepared)
            outcomes[index] = model.translator.finish(item, answer)
        return [outcome for outcome in outcomes if outcome is not None]

    def _submit(self, asked: Asked, running: Sequence[int], answers: Answers, jobs: list[Job]) -> None:
        """Hand the inputs `running` to the engine: all of them or, when there is no room, none."""
        engine = asked.model.engine
        # Jobs come from this thread alone, so the queue can only have emptied once there was room in it.
        if len(running) > 1 and engine.snapshot().queued + len(running) > engine.settings.queue:
            raise Overloaded(f"the queue has no room for {len(running)} inputs; try again later")
        for number, index in enumerate(running):
            item = asked.inputs[index]
            assert isinstance(item, Prepared)
            done = partial(answers.put, number)
            job = Job(item.source, asked.options, done, item.prefix, asked.alignments, asked.deadline)
            jobs.append(job)
            try:
                engine.submit(job)
            except (Overloaded, Unavailable):
                raise
            except FuseqError as error:
                answers.put(number, error)

    def _count(self, asked: Asked, outcomes: Sequence[Translation | FuseqError]) -> None:
        """Tell the metrics what became of the inputs."""
        self._metrics.inputs_failed(outcome for outcome in outcomes if isinstance(outcome, FuseqError))
        for outcome in outcomes:
            if isinstance(outcome, Translation):
                self._metrics.input_done(
                    outcome.queue_seconds,
                    outcome.encode_seconds,
                    outcome.decode_seconds,
                    outcome.total_seconds,
                    len(outcome.source_tokens),
                    len(outcome.tokens),
                )

    async def ListModels(self, request: pb.ListModelsRequest | Undecodable, context: Context) -> pb.ListModelsResponse:
        """See the protocol."""
        if isinstance(request, Undecodable):
            raise InvalidInput("the request is not a valid message")
        return pb.ListModelsResponse(
            models=[_describe(model, self._widest(model)) for model in self._registry],
            max_inputs=self._max_inputs,
            max_beam=min(map(self._widest, self._registry), default=self._max_beam),
        )

    def _widest(self, model: Model) -> int:
        """Largest beam that the model can serve here: memory may hold fewer rows than were asked for."""
        return min(self._max_beam, model.engine.capacity)


def _prepare_all(
    model: Model,
    inputs: Sequence[pb.Input],
    options: SearchOptions,
    truncate: bool,
    bad: dict[int, InvalidInput],
) -> list[Prepared | FuseqError]:
    """Texts to ids; an input that cannot be served is its error."""
    prepared: list[Prepared | FuseqError] = []
    for index, item in enumerate(inputs):
        try:
            prepared.append(bad.get(index) or model.translator.prepare(item.text, options, item.prefix, truncate))
        except FuseqError as error:
            prepared.append(error)
    return prepared


def _describe(model: Model, max_beam: int) -> pb.Model:
    manifest, options = model.manifest, model.translator.default_options
    return pb.Model(
        name=manifest.name,
        version=manifest.version,
        source_language=manifest.source_language,
        target_language=manifest.target_language,
        architecture=manifest.architecture,
        precision=model.precision,
        device=model.device,
        max_source_tokens=manifest.limits.source,
        max_target_tokens=manifest.limits.target,
        alignments=model.engine.stages.align is not None,
        defaults=pb.Options(
            beam=min(options.beam, max_beam),
            nbest=options.nbest,
            length_penalty=options.length_penalty,
            max_length_ratio=options.max_length_ratio,
            max_length_margin=options.max_length_margin,
        ),
        licence=manifest.provenance.licence,
        attribution=manifest.provenance.attribution,
    )
