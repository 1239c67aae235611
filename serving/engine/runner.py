"""Carries plans out: frees rows, encodes and admits, runs one step, and hands candidates to the searches."""

from __future__ import annotations

import math
import time
from collections import Counter

from serving.core.errors import BundleError, ModelFailure
from serving.core.manifest import Bundle
from serving.engine.encoder import Encoder
from serving.engine.jobs import Group
from serving.engine.observer import Observer, Silent
from serving.engine.scheduler import Executed, Plan
from serving.engine.sessions import Stages
from serving.engine.slots import Slots
from serving.engine.step import Candidates, Step, check_step, read_by_length


def _failure(stage: str, error: Exception) -> ModelFailure:
    return ModelFailure(f"the {stage} graph failed: {' '.join(str(error).split())}")


class Runner:
    """The graphs and slots of one bundle."""

    def __init__(self, bundle: Bundle, stages: Stages, *, rows: int, memory_bytes: int, observer: Observer) -> None:
        """Allocate the slots and check the graphs against the state.

        Raises:
            BundleError: a graph does not fit the state.
            ConfigError: not even one row fits into `memory_bytes`.
        """
        manifest = bundle.manifest
        spec = manifest.state_spec()
        check_step(spec, stages.step)
        self._vocabulary = manifest.target_codec.size
        self._observer = observer
        self._encoder = Encoder(stages.encode, spec)
        self.slots = Slots(
            spec,
            rows=rows,
            memory_bytes=memory_bytes,
            source=manifest.limits.source,
            time=manifest.limits.target,
            by_length=read_by_length(spec, stages.step),
        )
        self._step = Step(stages.step, self.slots)
        self._groups: dict[Group, None] = {}  # that hold rows
        self._widths: Counter[int] = Counter()  # candidates wanted -> groups
        self.steps = 0
        self.encodes = 0

    def drop(self, plan: Plan) -> None:
        """Free the rows of the groups that leave."""
        for group, _ in plan.leave:
            self._release(group)
        self.slots.settle()

    def run(self, plan: Plan) -> Executed:
        """Encode and admit, then run one step. What fails, fails alone."""
        executed = Executed()
        for groups in plan.encode:
            self._admit(groups, executed)
        if self.slots.count:
            self._decode(executed)
        return executed

    def clear(self) -> None:
        """Free every row."""
        self.slots.clear()
        self._groups.clear()
        self._widths.clear()

    def warm_up(self, group: Group) -> None:
        """Run encoder and step once, so that the first caller does not pay for first allocations.

        Raises:
            BundleError: a graph fails.
        """
        observer, self._observer = self._observer, Silent()
        executed = Executed()
        try:
            self._admit([group], executed)
            if not executed.failed:
                self._decode(executed)
        except ValueError as error:  # an array of another shape than the state's
            raise BundleError(f"the bundle's graphs do not fit its state: {' '.join(str(error).split())}") from error
        self.clear()
        self.steps = self.encodes = 0
        self._observer = observer
        if executed.failed:
            raise BundleError(f"the bundle cannot be run: {executed.failed[0][1]}")

    def _admit(self, groups: list[Group], executed: Executed) -> None:
        """Encode sources of one length and give each its first row."""
        begin = time.monotonic()
        self.encodes += 1
        try:
            encoded = self._encoder.run([group.job.source for group in groups])
        except Exception as error:  # the runtime's own exceptions share no base class below this
            if len(groups) == 1:
                executed.failed.append((groups[0], _failure("encode", error)))
            else:  # one of them is to blame; the others shall not suffer
                for group in groups:
                    self._admit([group], executed)
            return
        self.slots.admit(groups, encoded)
        end = time.monotonic()
        for group in groups:
            group.encoded_at = end
            group.first_step = self.steps  # the step that follows in this very turn
            self._groups[group] = None
            self._widths[group.search.candidates] += 1
        self._observer.encoded(len(groups), len(groups) * groups[0].length, end - begin)

    def _release(self, group: Group) -> None:
        if group in self._groups:
            del self._groups[group]
            width = group.search.candidates
            self._widths[width] -= 1
            if not self._widths[width]:
                del self._widths[width]
            self.slots.release(group)

    def _decode(self, executed: Executed) -> None:
        """Run one step on all rows and let every search go on from it."""
        begin = time.monotonic()
        slots, rows = self.slots, self.slots.count
        slots.fit()
        k = min(max(self._widths), self._vocabulary)
        failures: dict[int, Exception] = {}
        try:
            candidates = self._step.run(k)
        except Exception:  # the runtime's own exceptions share no base class below this
            candidates, failures = self._step.run_apart(k)
        slots.stepped()
        for row, error in failures.items():
            group = slots.owners[row]
            if group in self._groups:
                self._release(group)
                executed.failed.append((group, _failure("step", error)))
        done = self._advance(candidates)
        now = time.monotonic()
        for group in done:
            group.finished_at = now
            group.last_step = self.steps
            self._release(group)
            if not any(math.isnan(hypothesis.score) for hypothesis in group.search.hypotheses()):
                executed.finished.append(group)
            else:
                executed.failed.append((group, ModelFailure("the model gave scores that are not numbers")))
        slots.settle()
        self.steps += 1
        self._observer.stepped(rows, time.monotonic() - begin)

    def _advance(self, candidates: Candidates) -> list[Group]:
        """Give each search its rows' candidates; returns the groups that have finished."""
        ids, scores = candidates
        slots, tokens, done = self.slots, self.slots.tokens, []
        for group in self._groups:
            held, search = group.slots, group.search
            if len(held) == 1:
                row = held[0]
                parents = search.advance((ids[row],), (scores[row],))
                if len(parents) == 1:  # greedy, nearly always: the row stays where it is
                    tokens[row] = search.tokens[0]
                    continue
            else:
                parents = search.advance([ids[row] for row in held], [scores[row] for row in held])
            if parents:
                slots.reorder(group, parents)
            else:
                done.append(group)
        return done
