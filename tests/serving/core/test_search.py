"""Searches on tiny random models, against exhaustive and naive references."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.core.errors import InvalidInput
from serving.core.search import Search, SearchTask, has_repetition, length_penalty, repeated_tail, start_search
from serving.core.types import (
    Hypothesis,
    LengthNormalisation,
    SearchOptions,
    SearchRules,
    SpecialIds,
    StopReason,
)

EOS = 0
SPECIAL = SpecialIds(pad=98, bos=99, eos=EOS, unk=97)  # ids of the tiny models are 0 .. vocabulary - 1
SOURCE = (5, 6, 7, EOS)

RULES = SearchRules()  # of models trained here
Model = Callable[[tuple[int, ...]], NDArray[np.float64]]


def random_model(seed: int, vocabulary: int, spread: float = 1.5) -> Model:
    """Log-probabilities of the next token that depend on all tokens so far."""

    def model(tokens: tuple[int, ...]) -> NDArray[np.float64]:
        logits = np.random.default_rng([seed, *tokens]).normal(0.0, spread, vocabulary)
        return np.asarray(logits - np.log(np.exp(logits).sum()))

    return model


def best_of(model: Model, tokens: tuple[int, ...], width: int) -> tuple[list[int], list[float]]:
    scores = model(tokens)
    ids = np.argsort(-scores, kind="stable")[:width]
    return ids.tolist(), scores[ids].tolist()


def run(search: Search, model: Model, extra: int = 0) -> list[Hypothesis]:
    """Drive a search as the engine does: a state a row, reordered by the parents. `extra` candidates are ignored."""
    states: list[tuple[int, ...]] = [()]
    while not search.done:
        states = [(*state, token) for state, token in zip(states, search.tokens, strict=True)]
        answers = [best_of(model, state[1:], search.candidates + extra) for state in states]
        parents = search.advance([ids for ids, _ in answers], [scores for _, scores in answers])
        assert len(parents) == search.rows <= search.most_rows
        states = [states[parent] for parent in parents]
    return search.hypotheses()


def decode(
    model: Model,
    options: SearchOptions,
    prefix: tuple[int, ...] = (),
    extra: int = 0,
    rules: SearchRules = RULES,
) -> list[Hypothesis]:
    return run(start_search(SearchTask(SOURCE, options, SPECIAL, 60, prefix, rules)), model, extra)


def up_to(limit: int, **options: object) -> SearchOptions:
    """Options under which at most `limit` tokens are generated."""
    return SearchOptions(max_length_ratio=0.0, max_length_margin=limit, **options)  # type: ignore[arg-type]


def outputs(hypotheses: Iterable[Hypothesis]) -> list[tuple[tuple[int, ...], StopReason]]:
    return [(hypothesis.tokens, hypothesis.stop_reason) for hypothesis in hypotheses]


def every_output(model: Model, vocabulary: int, limit: int, alpha: float, prefix: tuple[int, ...]) -> list[Hypothesis]:
    """All outputs there are, best first."""
    found = []
    for length in range(limit + 1):
        for tokens in itertools.product(range(1, vocabulary), repeat=length):
            path = (*tokens, EOS) if length < limit else tokens
            total = sum(float(model(prefix + path[:i])[token]) for i, token in enumerate(path))
            reason = StopReason.EOS if length < limit else StopReason.LENGTH
            found.append(Hypothesis(prefix + tokens, total / length_penalty(len(path), alpha), total, reason))
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def unpruned_beam(
    model: Model, options: SearchOptions, limit: int, prefix: tuple[int, ...], rules: SearchRules = RULES
) -> list[Hypothesis]:
    """Beam search that never stops early: what pruning must agree with."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[Hypothesis] = []

    def finish(tokens: tuple[int, ...], total: float, reason: StopReason, length: int) -> None:
        alpha = options.length_penalty
        penalty = length**alpha if rules.length_normalisation == "power" else ((5 + length) / 6) ** alpha
        finished.append(Hypothesis(prefix + tokens, total / penalty, total, reason))

    for length in range(1, max(1, limit - rules.end_at_limit) + 1):
        ranked = sorted(
            (
                (total + float(p), tokens, token)
                for total, tokens in live
                for token, p in enumerate(model(prefix + tokens))
                if token not in rules.banned
            ),
            key=lambda extension: -extension[0],
        )
        live = []
        for rank, (total, tokens, token) in enumerate(ranked):
            if token == EOS:
                if rank < options.beam and options.forced_length is None:
                    finish(tokens, total, StopReason.EOS, length)
            elif len(live) < options.beam:
                live.append((total, (*tokens, token)))
    for total, tokens in live:
        finish(tokens, total, StopReason.LENGTH, limit)
    return sorted(finished, key=lambda hypothesis: -hypothesis.score)


models = st.integers(0, 2**32)
vocabularies = st.integers(3, 6)
limits = st.integers(1, 8)
alphas = st.sampled_from([0.0, 0.6, 1.0, 2.0])
prefixes = st.lists(st.integers(1, 2), max_size=3).map(tuple)
every_rules = st.builds(
    SearchRules,
    length_normalisation=st.sampled_from(LengthNormalisation),
    end_at_limit=st.booleans(),
    banned=st.sampled_from([frozenset[int](), frozenset({1}), frozenset({1, 2})]),
)


@settings(max_examples=60, deadline=None)
@given(models, st.integers(3, 4), st.integers(1, 4), alphas, prefixes)
def test_a_beam_that_holds_everything_finds_the_best_outputs_there_are(
    seed: int, vocabulary: int, limit: int, alpha: float, prefix: tuple[int, ...]
) -> None:
    model = random_model(seed, vocabulary)
    wanted = every_output(model, vocabulary, limit, alpha, prefix)[:5]
    wide = up_to(limit, beam=300, nbest=5, length_penalty=alpha)
    found = decode(model, wide, prefix)
    assert outputs(found) == outputs(wanted[: len(found)])
    assert [h.score for h in found] == pytest.approx([h.score for h in wanted[: len(found)]])
    assert len(found) == min(5, len(wanted))


@settings(max_examples=250, deadline=None)
@given(models, vocabularies, limits, st.integers(2, 5), alphas, prefixes, every_rules)
def test_case_47_pruning_changes_no_hypothesis_and_top_1_is_the_same_for_any_n_best(
    seed: int, vocabulary: int, limit: int, beam: int, alpha: float, prefix: tuple[int, ...], rules: SearchRules
) -> None:
    model = random_model(seed, vocabulary)
    for nbest in range(1, beam + 1):
        options = up_to(limit, beam=beam, nbest=nbest, length_penalty=alpha)
        wanted = unpruned_beam(model, options, limit, prefix, rules)[:nbest]
        found = decode(model, options, prefix, rules=rules)
        assert outputs(found) == outputs(wanted)
        assert [h.score for h in found] == pytest.approx([h.score for h in wanted])


@settings(max_examples=100, deadline=None)
@given(models, vocabularies, limits, alphas, every_rules)
def test_greedy_obeys_the_rules_of_the_model(
    seed: int, vocabulary: int, limit: int, alpha: float, rules: SearchRules
) -> None:
    model = random_model(seed, vocabulary)
    [found] = decode(model, up_to(limit, length_penalty=alpha, stop_repetition=False), rules=rules)
    tokens: tuple[int, ...] = ()
    total, room = 0.0, max(1, limit - rules.end_at_limit)
    while len(tokens) < room and not (tokens and tokens[-1] == EOS):
        allowed = np.array([-np.inf if token in rules.banned else p for token, p in enumerate(model(tokens))])
        tokens, total = (*tokens, int(allowed.argmax())), total + float(allowed.max())
    ended = tokens[-1] == EOS
    length = len(tokens) if ended else limit  # an end that is forced counts, and costs nothing
    assert found.tokens == (tokens[:-1] if ended else tokens)
    assert found.stop_reason is (StopReason.EOS if ended else StopReason.LENGTH)
    assert found.score == pytest.approx(total / length_penalty(length, alpha, rules.length_normalisation))


@pytest.mark.parametrize("beam", [1, 3])
def test_a_forced_length_has_neither_ends_nor_banned_ids(beam: int) -> None:
    rules = SearchRules(end_at_limit=True, banned=frozenset({2}))
    for seed in range(20):
        options = SearchOptions(beam=beam, forced_length=6)
        [found] = decode(random_model(seed, 5), options, rules=rules)
        assert len(found.tokens) == 6
        assert not {EOS, 2} & set(found.tokens)


def test_length_penalties_are_what_they_say_and_never_fall() -> None:
    for alpha in (0.0, 0.6, 1.0, 10.0):
        gnmt = [length_penalty(n, alpha) for n in range(1, 600)]
        power = [length_penalty(n, alpha, LengthNormalisation.POWER) for n in range(1, 600)]
        assert gnmt[24] == pytest.approx(5**alpha)
        assert power[24] == pytest.approx(25**alpha)
        assert gnmt == sorted(gnmt)
        assert power == sorted(power)


def test_case_47_the_search_goes_on_past_an_end_that_a_longer_output_beats() -> None:
    """The end symbol leads at once, but under a length penalty the longer output wins in the end."""

    def model(tokens: tuple[int, ...]) -> NDArray[np.float64]:
        return np.log([0.5, 0.49, 0.01]) if not tokens else np.log([0.01, 0.98, 0.01])

    for nbest in (1, 2, 3):
        found = decode(model, up_to(9, beam=3, nbest=nbest, length_penalty=1.0))
        assert found[0].tokens == (1,) * 9
        assert found[0].stop_reason is StopReason.LENGTH


@settings(max_examples=100, deadline=None)
@given(models, vocabularies, limits, st.integers(1, 5), alphas, prefixes)
def test_candidates_beyond_those_wanted_change_nothing(
    seed: int, vocabulary: int, limit: int, beam: int, alpha: float, prefix: tuple[int, ...]
) -> None:
    model = random_model(seed, vocabulary)
    options = up_to(limit, beam=beam, nbest=beam, length_penalty=alpha)
    assert decode(model, options, prefix) == decode(model, options, prefix, extra=vocabulary)


@settings(max_examples=50, deadline=None)
@given(models, vocabularies, limits, prefixes)
def test_greedy_takes_the_likeliest_token_at_every_step(
    seed: int, vocabulary: int, limit: int, prefix: tuple[int, ...]
) -> None:
    model = random_model(seed, vocabulary)
    tokens: tuple[int, ...] = ()
    total, ended = 0.0, False
    while not ended and len(tokens) < limit:
        scores = model(prefix + tokens)
        best = int(scores.argmax())
        total += float(scores[best])
        ended = best == EOS
        tokens += () if ended else (best,)
    (found,) = decode(model, up_to(limit), prefix)
    assert found.tokens == prefix + tokens
    assert found.log_probability == pytest.approx(total)
    assert found.score == pytest.approx(total / length_penalty(len(tokens) + ended, 0.6))
    assert found.stop_reason is (StopReason.EOS if ended else StopReason.LENGTH)


@settings(max_examples=60, deadline=None)
@given(models, vocabularies, st.integers(1, 6), st.integers(1, 4), prefixes)
def test_a_forced_length_is_kept_exactly_and_never_ends_early(
    seed: int, vocabulary: int, length: int, beam: int, prefix: tuple[int, ...]
) -> None:
    model = random_model(seed, vocabulary)
    options = SearchOptions(beam=beam, nbest=beam, forced_length=length)
    found = decode(model, options, prefix)
    assert all(len(h.tokens) == len(prefix) + length and EOS not in h.tokens for h in found)
    assert {h.stop_reason for h in found} == {StopReason.LENGTH}
    if beam > 1:
        assert outputs(found) == outputs(unpruned_beam(model, options, length, prefix)[:beam])


@settings(max_examples=60, deadline=None)
@given(models, vocabularies, st.floats(0, 3), st.integers(0, 5), st.integers(1, 4), prefixes)
def test_case_44_an_output_is_never_longer_than_asked(
    seed: int, vocabulary: int, ratio: float, margin: int, beam: int, prefix: tuple[int, ...]
) -> None:
    def model(tokens: tuple[int, ...]) -> NDArray[np.float64]:  # never wants to end
        scores = random_model(seed, vocabulary)(tokens)
        scores[EOS] = -30.0
        return scores

    options = SearchOptions(beam=beam, nbest=beam, max_length_ratio=ratio, max_length_margin=margin)
    limit = max(1, int(ratio * len(SOURCE)) + margin)
    for found in decode(model, options, prefix):
        assert len(found.tokens) - len(prefix) <= limit
        assert found.stop_reason is not StopReason.EOS or len(found.tokens) - len(prefix) < limit


def looping(block: tuple[int, ...]) -> Model:
    """A model that says `block` for ever."""

    def model(tokens: tuple[int, ...]) -> NDArray[np.float64]:
        scores = np.full(12, np.log(0.02 / 11))
        scores[block[len(tokens) % len(block)]] = np.log(0.98)
        return scores

    return model


@pytest.mark.parametrize("beam", [1, 2, 4])
@pytest.mark.parametrize("block", [(3,), (3, 4), (1, 2, 3), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_case_44_a_loop_is_cut_to_one_occurrence(block: tuple[int, ...], beam: int) -> None:
    best = decode(looping(block), SearchOptions(beam=beam, max_length_margin=50))[0]
    assert best.stop_reason is StopReason.REPETITION or beam > 1
    if best.stop_reason is StopReason.REPETITION:
        assert best.tokens == block
    assert len(best.tokens) <= 2 * len(SOURCE) + 50


@pytest.mark.parametrize("beam", [1, 3])
def test_case_44_a_loop_is_wanted_where_the_source_loops_or_the_length_is_forced_or_the_rule_is_off(beam: int) -> None:
    long = (3,) * 40
    looped = SearchTask((*([7] * 14), EOS), up_to(40, beam=beam), SPECIAL, 60)
    assert run(start_search(looped), looping((3,)))[0].tokens == long
    assert decode(looping((3,)), SearchOptions(beam=beam, forced_length=40))[0].tokens == long
    assert decode(looping((3,)), up_to(40, beam=beam, stop_repetition=False))[0].tokens == long


def test_case_44_whatever_ended_by_itself_beats_a_loop() -> None:
    def model(tokens: tuple[int, ...]) -> NDArray[np.float64]:
        if tokens and tokens[0] == 2:  # the poor start that ends
            return np.log([0.9, 0.05, 0.05])
        return np.log([0.001, 0.99, 0.009])

    (loop,) = decode(model, SearchOptions(max_length_margin=50, length_penalty=0.0))
    for nbest in (1, 3):
        best = decode(model, SearchOptions(beam=3, nbest=nbest, max_length_margin=50, length_penalty=0.0))[0]
        assert (loop.stop_reason, best.stop_reason) == (StopReason.REPETITION, StopReason.EOS)
        assert best.score < loop.score


def plain_tail(tokens: list[int]) -> int:
    """The rule as its sentence says it: 1 to 8 tokens, at least 4 times, over at least 12 tokens."""
    for block in range(1, 9):
        times = max(4, -(-12 // block))
        if len(tokens) >= block * times and tokens[-block * times :] == tokens[-block:] * times:
            return block
    return 0


repeating = st.builds(
    lambda head, block, times, tail: head + block * times + tail,
    st.lists(st.integers(1, 3), max_size=6),
    st.lists(st.integers(1, 3), min_size=1, max_size=9),
    st.integers(0, 14),
    st.lists(st.integers(1, 3), max_size=3),
)


@settings(max_examples=400, deadline=None)
@given(repeating)
def test_case_44_the_rule_is_what_it_says(tokens: list[int]) -> None:
    assert repeated_tail(tokens) == plain_tail(tokens)
    assert has_repetition(tokens) == any(plain_tail(tokens[:end]) for end in range(len(tokens) + 1))


@settings(max_examples=40, deadline=None)
@given(models, st.integers(2, 4), st.integers(1, 30))
def test_searches_that_run_side_by_side_do_not_know_of_each_other(seed: int, beam: int, turns: int) -> None:
    model = random_model(seed, 5)
    options = up_to(8, beam=beam, nbest=beam)
    alone = decode(model, options)
    other = start_search(SearchTask(SOURCE, up_to(6, beam=5), SPECIAL, 60))
    for _ in range(turns):
        if other.done:
            break
        other.advance([[1, 2, 3, 4, EOS]] * other.rows, [[-1.0, -2.0, -3.0, -4.0, -5.0]] * other.rows)
    assert decode(model, options) == alone


@settings(max_examples=30, deadline=None)
@given(models, st.integers(1, 4))
def test_arrays_and_lists_of_candidates_are_the_same(seed: int, beam: int) -> None:
    model = random_model(seed, 6)
    tasks = [start_search(SearchTask(SOURCE, up_to(6, beam=beam, nbest=beam), SPECIAL, 60)) for _ in range(2)]
    lists, arrays = tasks
    states: list[tuple[int, ...]] = [()]
    while not lists.done:
        states = [(*state, token) for state, token in zip(states, lists.tokens, strict=True)]
        answers = [best_of(model, state[1:], 6) for state in states]
        ids, scores = [a[0] for a in answers], [a[1] for a in answers]
        parents = lists.advance(ids, scores)
        assert arrays.advance(np.array(ids), np.array(scores)) == parents
        states = [states[parent] for parent in parents]
    assert arrays.hypotheses() == lists.hypotheses()


@pytest.mark.parametrize(
    "options",
    [
        SearchOptions(beam=0),
        SearchOptions(beam=-1),
        SearchOptions(beam=2, nbest=3),
        SearchOptions(nbest=0),
        SearchOptions(length_penalty=-0.1),
        SearchOptions(length_penalty=float("nan")),
        SearchOptions(length_penalty=float("inf")),
        SearchOptions(length_penalty=1e300),
        SearchOptions(max_length_ratio=-1.0),
        SearchOptions(max_length_ratio=float("nan")),
        SearchOptions(max_length_ratio=float("inf")),
        SearchOptions(max_length_margin=-1),
        SearchOptions(forced_length=0),
        SearchOptions(forced_length=61),
    ],
)
def test_options_out_of_range_are_refused(options: SearchOptions) -> None:
    with pytest.raises(InvalidInput):
        start_search(SearchTask(SOURCE, options, SPECIAL, 60))


def test_the_prefix_takes_decoder_positions() -> None:
    model = looping((1, 2, 3, 4, 5, 6, 7, 8, 9))
    options = SearchOptions(max_length_margin=100)
    for size in (0, 1, 58, 59):
        task = SearchTask(SOURCE, options, SPECIAL, 60, (4,) * size)
        search = start_search(task)
        (found,) = run(search, model)
        assert len(found.tokens) == 60  # the last one is never fed, so begin symbol and tokens before it take 60
        assert search.position == 60
    with pytest.raises(InvalidInput, match="prefix"):
        start_search(SearchTask(SOURCE, options, SPECIAL, 60, (4,) * 60))
