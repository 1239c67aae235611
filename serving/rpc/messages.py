"""Messages of the service to plain values and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from fuseq.v1 import translator_pb2 as pb
from serving.core.errors import FuseqError, InvalidInput
from serving.core.types import SearchOptions, StopReason
from serving.engine.translator import Candidate, Translation
from serving.rpc.interceptors import details_of, status_of

STOP_REASONS = {
    StopReason.EOS: pb.STOP_REASON_EOS,
    StopReason.LENGTH: pb.STOP_REASON_LENGTH,
    StopReason.REPETITION: pb.STOP_REASON_REPETITION,
}
MOST_TOKENS = 1_000_000  # bound of token counts in options; the model's own limit is far below


def _within(name: str, value: float, most: float) -> float:
    """The value, refused when it is not a number between 0 and `most`."""
    if not (math.isfinite(value) and 0 <= value <= most):
        raise InvalidInput(f"{name} {value:g}: must be 0 to {most:g}")
    return value


def search_options(options: pb.Options, defaults: SearchOptions, max_beam: int) -> SearchOptions:
    """What is asked for, with the model's defaults for what is left out; a default beam over `max_beam` is cut to it.

    Raises:
        InvalidInput: an option is out of range.
    """

    def given(name: str, default: float) -> Any:
        return getattr(options, name) if options.HasField(name) else default

    nbest = given("nbest", 1)
    beam = given("beam", min(max(defaults.beam, nbest), max_beam))
    if not 1 <= beam <= max_beam:
        raise InvalidInput(f"beam {beam}: must be 1 to {max_beam}")
    if not 1 <= nbest <= beam:
        raise InvalidInput(f"nbest {nbest}: must be 1 to the beam of {beam}")
    forced = given("forced_length", 0)
    if options.HasField("forced_length") and not 1 <= forced <= MOST_TOKENS:
        raise InvalidInput(f"forced_length {forced}: must be 1 to {MOST_TOKENS}")
    return SearchOptions(
        beam=beam,
        nbest=nbest,
        length_penalty=_within("length_penalty", given("length_penalty", defaults.length_penalty), 10),
        max_length_ratio=_within("max_length_ratio", given("max_length_ratio", defaults.max_length_ratio), 100),
        max_length_margin=int(
            _within("max_length_margin", given("max_length_margin", defaults.max_length_margin), MOST_TOKENS)
        ),
        stop_repetition=not options.allow_repetition,
        forced_length=forced or None,
    )


def _alignment(weights: NDArray[np.float32], source: Sequence[str], tokens: Sequence[str]) -> pb.Alignment:
    target = [*tokens, source[-1]]  # both end with the end symbol
    return pb.Alignment(source=source, target=target[: len(weights)], weights=weights.ravel())


def _hypothesis(candidate: Candidate, source: Sequence[str]) -> pb.Hypothesis:
    weights = candidate.alignment
    return pb.Hypothesis(
        text=candidate.text,
        score=candidate.score,
        tokens=candidate.tokens,
        stop_reason=STOP_REASONS[candidate.stop_reason],
        alignment=None if weights is None else _alignment(weights, source, candidate.tokens),
    )


def translated(answer: Translation, options: SearchOptions) -> pb.Result:
    """The result of an input that was translated."""
    hypotheses = [_hypothesis(candidate, answer.source_tokens) for candidate in answer.hypotheses]
    best = hypotheses[0]
    return pb.Result(
        status=pb.Status(code=pb.CODE_OK),
        text=best.text,
        score=best.score,
        tokens=best.tokens,
        stop_reason=best.stop_reason,
        truncated=answer.truncated,
        alignment=best.alignment if best.HasField("alignment") else None,
        hypotheses=hypotheses if options.nbest > 1 else (),
        timings=pb.Timings(
            queue_seconds=answer.queue_seconds,
            encode_seconds=answer.encode_seconds,
            decode_seconds=answer.decode_seconds,
            align_seconds=answer.align_seconds,
            total_seconds=answer.total_seconds,
        ),
    )


def failed(error: FuseqError) -> pb.Result:
    """The result of an input that failed."""
    code = status_of(error).value[0]
    return pb.Result(status=pb.Status(code=code, message=details_of(error)))  # type: ignore[arg-type]


@functools.cache
def _bytes_request() -> type[Message]:
    """TranslateRequest with bytes for every string: the same on the wire, and it reads what is no UTF-8."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        for field in message.field:
            if field.type == field.TYPE_STRING:
                field.type = field.TYPE_BYTES
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(pb.TranslateRequest.DESCRIPTOR.full_name))


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the {name} is not valid UTF-8 at byte {error.start}") from None


def salvage(data: bytes) -> tuple[pb.TranslateRequest, dict[int, InvalidInput]]:
    """Read a request that holds invalid UTF-8; the inputs it concerns come out empty, with their errors.

    Raises:
        InvalidInput: nothing of the request can be used.
    """
    try:
        raw: Any = _bytes_request().FromString(data)
    except DecodeError:
        raise InvalidInput("the request is not a valid message") from None
    request = pb.TranslateRequest(model=_text(raw.model, "model's name"))
    request.options.ParseFromString(raw.options.SerializeToString())  # no strings in there
    bad: dict[int, InvalidInput] = {}
    for index, item in enumerate(raw.inputs):
        try:
            request.inputs.add(text=_text(item.text, "text"), prefix=_text(item.prefix, "prefix"))
        except InvalidInput as error:
            request.inputs.add()
            bad[index] = error
    return request, bad
