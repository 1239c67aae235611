"""The yardstick: one job at a time, no slots, fresh arrays at every step, everything passed by value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serving.core.manifest import Bundle
from serving.core.search import SearchTask, start_search
from serving.core.state_spec import Role
from serving.core.types import Hypothesis, SearchOptions
from serving.engine.sessions import Stages


def decode_alone(
    bundle: Bundle, stages: Stages, source: Sequence[int], options: SearchOptions, prefix: tuple[int, ...] = ()
) -> list[Hypothesis]:
    """The hypotheses of one source, by the plainest loop that the graphs allow."""
    manifest = bundle.manifest
    spec = manifest.state_spec()
    search = start_search(SearchTask(source, options, manifest.special_ids(), manifest.limits.target, prefix))
    time = len(prefix) + search.limit
    names = [tensor.name for tensor in spec.of(Role.MEMORY, Role.RECURRENT)]
    feed = {"source": np.array([source], np.int64), "lengths": np.array([len(source)], np.int32)}
    state = dict(zip(names, stages.encode.run(names, feed), strict=True))
    for tensor in spec.of(Role.CACHE):
        state[tensor.name] = np.zeros(tensor.shape(1, 0, time), tensor.dtype)
    inputs = {port.name for port in stages.step.get_inputs()}
    outputs = [port.name for port in stages.step.get_outputs()]
    while not search.done:
        offered = {
            **state,
            "tokens": np.array(search.tokens, np.int64),
            "positions": np.full(search.rows, search.position, np.int32),
            "k": np.array([min(search.candidates, manifest.target_codec.size)], np.int64),
        }
        answers = dict(zip(outputs, stages.step.run(outputs, {n: offered[n] for n in inputs}), strict=True))
        parents = search.advance(answers["top_tokens"], answers["top_scores"])
        for name in state:
            state[name] = answers.get(f"next.{name}", state[name])[parents]
    return search.hypotheses()
