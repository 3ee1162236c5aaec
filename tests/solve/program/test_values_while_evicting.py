"""What greedy eviction keeps account of from run to run is what one finds by counting everything anew."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.eviction import evict as module
from stowage.stages.formulations.eviction.evict import evict
from stowage.stages.formulations.eviction.rule import RULES, Rule
from stowage.stages.formulations.eviction.step import EvictionStep
from stowage.stages.formulations.eviction.values import LONGEST, Values
from stowage.stages.ir.trace import TraceTables
from stowage.stages.solve.program.evicting import eviction_step
from stowage.stages.solve.program.of_trace import program_of
from tests.matrix import examples, some
from tests.solve.prepared import prepare_trace
from tests.solve.synthetic_steps import training_steps


class Checked(Values):
    """Compares at every count."""

    counts = 0
    longest = 0

    def count_again(self) -> None:
        super().count_again()
        for value, there in enumerate(self.in_memory):
            if self._ran(self._step.maker[value]):
                assert self.need[value] == self._needed_next(value)
            if there:
                nodes = self._made_by(value)
                Checked.longest = max(Checked.longest, len(nodes))
                stays = len(nodes) > LONGEST or any(self._step.once[n] for n in nodes)
                cost_s = math.inf if stays else math.fsum(self._step.time_s[n] for n in nodes)
                assert self.cost_s[value] == cost_s
                assert self._last_again[value] == (-1 if stays else min(self._step.last_again[n] for n in nodes))
        Checked.counts += 1

    def _needed_next(self, value: int) -> int:
        """Return the first reader to come, of the value or of what has to be made of it."""
        step, found = self._step, len(self._step.reads) + 1
        for reader in step.readers[value]:
            if not self._ran(reader):
                return min(found, reader)
            found = min([found, *(self._needed_next(m) for m in step.creates[reader] if not self.in_memory[m])])
        return found

    def _made_by(self, value: int) -> set[int]:
        node = self._step.maker[value]
        gone = [v for v in self._step.reads[node] if not self.in_memory[v]]
        return {node}.union(*(self._made_by(v) for v in gone))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> type[Checked]:
    """Checks every count of the tests that ask for it."""
    monkeypatch.setattr(module, "Values", Checked)
    monkeypatch.setattr(Checked, "counts", 0)
    monkeypatch.setattr(Checked, "longest", 0)
    return Checked


def test_account_of_random_steps(checked: type[Checked]) -> None:
    @settings(max_examples=examples(200), deadline=None, derandomize=True)
    @given(training_steps(), st.floats(0, 1), st.sampled_from(RULES))
    def compare(trace: TraceTables, share: float, rule: Rule) -> None:
        step = eviction_step(program_of(trace, prepare_trace(trace).nodes))
        every = sum(step.nbytes) + max(step.workspace_bytes)
        evict(step, rule, int(step.least_bytes + share * (every - step.least_bytes)))

    compare()
    assert checked.counts > 100


@pytest.mark.parametrize("rule", some(RULES[:3], keep=RULES[:1]))
def test_account_of_a_long_chain_that_keeps_little(checked: type[Checked], rule: Rule) -> None:
    """What takes more nodes than are counted has to stay, and may go again once something before it is there."""
    layers = 90
    forward = [() if not n else (n - 1,) for n in range(layers)]
    backward = [(n, layers + k - 1) if k else (n,) for k, n in enumerate(reversed(range(layers)))]
    count = 2 * layers
    step = EvictionStep(
        time_s=[1e-6 if n < 80 else 1.0 for n in range(count)],
        workspace_bytes=[0] * count,
        reads=[*forward, *backward],
        creates=[(n,) for n in range(count)],
        takes=[()] * count,
        once=[False] * count,
        last_again=[count] * count,
        freed_bytes=[0] * count,
        nbytes=[100 if n < 80 else 10 for n in range(count)],
        stays=frozenset({count - 1}),
    )
    evict(step, rule, 420)
    assert checked.counts > 50
    assert checked.longest > LONGEST
