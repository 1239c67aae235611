"""What Translate and ListModels answer, over a real port."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuseq import FuseqError
from fuseq.v1 import translator_pb2 as pb
from serving.core.errors import InvalidInput, NotFound, Unsupported
from serving.core.types import SearchOptions, StopReason
from serving.rpc.messages import salvage
from tests.serving.engine.tiny import SOURCE_LIMIT
from tests.serving.rpc.harness import Running, request

A, B = "the cat sat on the mat", "rain falls"


def plain(answer: Any) -> tuple[str, tuple[str, ...], Any]:
    """Text, tokens and score; scores are equal to the 1e-5 that neighbours may move them by."""
    return answer.text, answer.tokens, pytest.approx(answer.score, abs=1e-5)


def test_the_answer_is_the_translators(shared: Running) -> None:
    translator = shared.server.registry.get().translator
    [expected] = translator.translate([A], SearchOptions(beam=3, nbest=2, max_length_ratio=1.0))
    assert not isinstance(expected, FuseqError)
    with shared.client() as client:
        answer = client.translate(A, beam=3, nbest=2, max_length_ratio=1.0)
    assert plain(answer) == plain(expected)
    assert answer.stop_reason == expected.stop_reason
    assert [plain(hypothesis) for hypothesis in answer.hypotheses] == [plain(c) for c in expected.hypotheses]
    assert len(answer.hypotheses) == 2
    spent = answer.timings
    assert spent.total == pytest.approx(spent.queue + spent.encode + spent.decode + spent.align, abs=1e-6)
    assert spent.decode > 0


def test_case_1_and_3_blank_inputs_keep_their_places_and_run_no_model(shared: Running) -> None:
    with shared.client() as client:
        alone = [client.translate(A), client.translate(B)]
        before = shared.snapshot().received
        answers = client.translate(["", A, " \t\n ", B, ""])
        assert shared.snapshot().received == before + 2
    assert [answers[0].text, answers[2].text, answers[4].text] == ["", "", ""]
    assert [plain(answers[1]), plain(answers[3])] == [plain(answer) for answer in alone]
    assert answers[0].stop_reason is StopReason.EOS


def test_no_inputs_no_results(shared: Running) -> None:
    with shared.stub() as stub:
        answer = stub.Translate(pb.TranslateRequest(), timeout=10)
    assert len(answer.results) == 0
    assert answer.model == "tiny-attending"


def test_case_11_control_symbols_in_the_text_are_text(shared: Running) -> None:
    texts = ["</s>", "<pad> <unk>", "a </s> b", "<s>", "\0", "a\0b"]
    with shared.client() as client:
        answers = client.translate(texts)
        assert [plain(answer) for answer in answers] == [plain(client.translate(text)) for text in texts]


def _text_of(shared: Running, tokens: int) -> str:
    """A text of so many tokens, the end symbol included."""
    codec = shared.server.registry.get().translator.source_codec
    text = "z" * (tokens - 2)
    assert len(codec.encode(text)) + 1 == tokens
    return text


def test_case_23_the_limit_counts_the_end_symbol(shared: Running) -> None:
    fits, over = _text_of(shared, SOURCE_LIMIT), _text_of(shared, SOURCE_LIMIT + 1)
    with shared.client() as client:
        assert not client.translate(_text_of(shared, SOURCE_LIMIT - 1)).truncated
        longest = client.translate(fits)
        assert not longest.truncated
        with pytest.raises(InvalidInput, match=f"{SOURCE_LIMIT + 1} tokens"):
            client.translate(over)
        cut = client.translate(over, truncate=True)
    assert cut.truncated
    assert plain(cut) == plain(longest)


def test_case_62_a_bad_input_hurts_no_neighbour(shared: Running) -> None:
    over = _text_of(shared, SOURCE_LIMIT + 50)
    with shared.client() as client:
        alone = plain(client.translate(A))
        first, bad, last = client.translate([A, over, A], errors="return")
        assert isinstance(bad, InvalidInput)
        assert not isinstance(first, FuseqError)
        assert not isinstance(last, FuseqError)
        assert plain(first) == alone
        assert plain(last) == alone
        with pytest.raises(InvalidInput):
            client.translate([A, over, A])


def test_case_62_the_results_fields_are_empty_unless_ok(shared: Running) -> None:
    with shared.stub() as stub:
        answer = stub.Translate(request("x", _text_of(shared, SOURCE_LIMIT + 1)), timeout=10)
    good, bad = answer.results
    assert good.status == pb.Status(code=pb.CODE_OK)
    assert bad.status.code == pb.CODE_INVALID_ARGUMENT
    assert "\n" not in bad.status.message
    assert bad == pb.Result(status=bad.status)


def _invalid_utf8(*texts: bytes) -> bytes:
    """A request as a careless client writes it."""
    data = b""
    for text in texts:
        item = b"\x0a" + bytes([len(text)]) + text
        data += b"\x12" + bytes([len(item)]) + item
    return data


def _raw(shared: Running, method: str, data: bytes, reply: Any = pb.TranslateResponse) -> Any:
    with grpc.insecure_channel(shared.address) as channel:
        return channel.unary_unary(f"/fuseq.v1.Translator/{method}", response_deserializer=reply.FromString)(
            data, timeout=10
        )


def test_case_75_invalid_utf8_fails_its_input_only(shared: Running) -> None:
    answer = _raw(shared, "Translate", _invalid_utf8(A.encode(), b"ab\xff", B.encode()))
    assert [result.status.code for result in answer.results] == [pb.CODE_OK, pb.CODE_INVALID_ARGUMENT, pb.CODE_OK]
    assert answer.results[1].status.message == "the text is not valid UTF-8 at byte 2"
    with shared.client() as client:
        assert answer.results[0].text == client.translate(A).text


@pytest.mark.parametrize("method", ["Translate", "ListModels"])
def test_case_75_garbage_is_a_clean_error(shared: Running, method: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        _raw(shared, method, b"\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the request is not a valid message"


def test_case_75_details_are_short_and_valid_whatever_the_name(shared: Running) -> None:
    with shared.client() as client, pytest.raises(NotFound) as caught:
        client.translate(A, model="no\nsuch\u202e\x00 model " + "ü" * 5000)
    assert len(str(caught.value)) <= 300
    assert str(caught.value).isprintable()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_invalid_input(data: bytes) -> None:
    try:
        found, bad = salvage(data)
    except InvalidInput:
        return
    assert set(bad) <= set(range(len(found.inputs)))
    pb.TranslateRequest.FromString(found.SerializeToString())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=5)), max_size=6), st.integers(0, 9))
def test_a_valid_request_is_salvaged_whole(pairs: list[tuple[str, str]], beam: int) -> None:
    inputs = [pb.Input(text=text, prefix=prefix) for text, prefix in pairs]
    whole = pb.TranslateRequest(model="m", inputs=inputs, options=pb.Options(beam=beam, truncate=True))
    assert salvage(whole.SerializeToString()) == (whole, {})


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=30), max_size=5))
def test_any_texts_come_back_in_order_and_count(shared: Running, texts: list[str]) -> None:
    with shared.client() as client:
        answers = client.translate(texts, max_length_ratio=0.0, max_length_margin=4)
        assert len(answers) == len(texts)
        for text, answer in zip(texts, answers, strict=True):
            assert plain(answer) == plain(client.translate(text, max_length_ratio=0.0, max_length_margin=4))


def test_prefix_one_for_all_and_one_for_each(shared: Running) -> None:
    with shared.client() as client:
        for answer in client.translate([A, B], prefix="the dog", beam=3):
            assert answer.text.startswith("the dog")
        one, none = client.translate([A, A], prefix=["a dog", ""])
        assert one.text.startswith("a dog")
        assert plain(none) == plain(client.translate(A))


def test_alignments_have_a_row_a_token_and_one_for_the_end(shared: Running) -> None:
    with shared.client() as client:
        answer = client.translate(A, beam=3, nbest=2, alignments=True)
        unasked = client.translate(A, beam=3, nbest=2)
    assert unasked.alignment is None
    assert plain(answer) == plain(unasked)
    for hypothesis in answer.hypotheses:
        assert hypothesis.alignment is not None
        assert hypothesis.alignment.source[-1] == hypothesis.alignment.target[-1] == "</s>"
        assert hypothesis.alignment.target[:-1] == hypothesis.tokens
        np.testing.assert_allclose(hypothesis.alignment.weights.sum(axis=1), 1.0, atol=1e-5)
    assert answer.alignment is not None
    np.testing.assert_array_equal(answer.alignment.weights, answer.hypotheses[0].alignment.weights)


def test_alignments_of_a_model_without_them_fail_the_inputs_that_need_one(shared: Running) -> None:
    with shared.client() as client:
        blank, text = client.translate(["", B], model="tiny-summing", alignments=True, errors="return")
    assert not isinstance(blank, FuseqError)
    assert isinstance(text, Unsupported)


def test_forced_length_gives_exactly_so_many_tokens(shared: Running) -> None:
    with shared.client() as client:
        answer = client.translate(A, forced_length=17)
    assert len(answer.tokens) == 17
    assert answer.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize(
    "options",
    [
        {"beam": 0},
        {"beam": 33},
        {"beam": 4_000_000_000},
        {"beam": 2, "nbest": 3},
        {"nbest": 0},
        {"nbest": 10_000},
        {"length_penalty": -1.0},
        {"length_penalty": float("nan")},
        {"length_penalty": 1e300},
        {"max_length_ratio": float("inf")},
        {"max_length_margin": 2_000_000_000},
        {"forced_length": 0},
        {"forced_length": 3_000_000_000},
    ],
)
def test_options_out_of_range_fail_the_call_and_name_the_option(shared: Running, options: dict[str, Any]) -> None:
    with shared.client() as client, pytest.raises(InvalidInput, match=list(options)[-1]):
        client.translate(A, **options)


def test_nbest_alone_widens_the_beam(shared: Running) -> None:
    with shared.client() as client:
        assert len(client.translate(A, nbest=3).hypotheses) == 3


def test_an_unknown_model_is_named(shared: Running) -> None:
    with shared.client() as client, pytest.raises(NotFound, match="no model 'x'; this server has tiny-attending"):
        client.translate(A, model="x")


def test_models_are_chosen_by_name(shared: Running) -> None:
    with shared.client() as client:
        default, named = client.translate(A), client.translate(A, model="tiny-attending")
        other = client.translate(A, model="tiny-summing")
    assert plain(default) == plain(named)
    assert default.tokens != other.tokens


def test_too_many_inputs_fail_the_call(shared: Running) -> None:
    with shared.client() as client, pytest.raises(InvalidInput, match="1025 inputs; a request may hold 1024"):
        client.translate([B] * 1025)


def test_list_models(shared: Running) -> None:
    with shared.client() as client:
        first, second = client.models()
    assert (first.name, first.alignments, first.precision, first.device) == ("tiny-attending", True, "fp32", "cpu")
    assert (second.name, second.alignments) == ("tiny-summing", False)
    assert first.max_source_tokens == SOURCE_LIMIT
    with shared.stub() as stub:
        answer = stub.ListModels(pb.ListModelsRequest(), timeout=10)
    assert (answer.max_inputs, answer.max_beam) == (1024, 32)
    assert answer.models[0].defaults.beam == 1


def test_a_message_over_the_limit_is_refused_and_the_server_goes_on(shared: Running) -> None:
    with shared.stub() as stub:
        with pytest.raises(grpc.RpcError) as caught:
            stub.Translate(request("x" * (5 << 20)), timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Translate(request(B), timeout=10).results[0].status.code == pb.CODE_OK
