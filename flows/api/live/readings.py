"""Finds which recorded step is valid now, from all that it reads besides tensors.

A value that has changed since the step was recorded (a number in a closure, a name in a batch, an attribute) may matter
or not. The step is recorded again, which takes no plan, and compared: the same record means that the value does not
matter; a record that differs in numbers alone has the same plan, and generated code reads these numbers at each call;
any other record is another step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from stowage.flows.api.live.changes import Changed, State, batch_changes, model_changes, same_state, tensor_forms
from stowage.flows.api.live.forms import ENOUGH, Samples, is_number
from stowage.stages.ir.trace import Constant
from stowage.stages.structure import tensors_of
from stowage.stages.structure.values import value_text
from stowage.stages.trace import Recorded
from stowage.stages.trace.calls.numbers import Difference, Number, Spot, compare, marked
from stowage.stages.workload import BatchSignature, ModelSignature, batch_signature
from stowage.stages.workload.executed import executed
from stowage.stages.workload.model_watch import ModelWatch
from stowage.stages.workload.reach import watch
from stowage.stages.workload.surroundings import Surroundings, same_value

Key = tuple[BatchSignature, ModelSignature]
Record = Callable[[Any], Recorded]
Say = Callable[[str], None]
MOST = 32
"""Number of recorded steps that are remembered."""
STATES = 8
"""Number of states that are remembered for each recorded step."""


class Accepted(NamedTuple):
    """A state for which a recorded step is valid, with its numbers and constants."""

    state: State
    numbers: dict[Spot, Number]
    constants: list[Constant] | None


class Traced:
    """A recorded step.

    Attributes:
        key: what it was recorded for; programs are found by it.
        forms: forms of the tensors in its batch.
        recorded: its tables; None until it is recorded.
        constants: contents of constants now, where they are not those recorded.
        version: raised when other numbers than before are read at each call.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self.forms = tensor_forms(key[0])
        self.recorded: Recorded | None = None
        self.constants: list[Constant] | None = None
        self.version = 0
        self.names: dict[Spot, str] = {}
        self.numbers: dict[str, Number] = {}
        self.surroundings = Surroundings([], [], {})
        self._base = State(*key, ())
        self._accepted: list[Accepted] = []
        self._samples = Samples()
        self._ignored: set[str] = set()

    def begin(self, recorded: Recorded, surroundings: Surroundings, state: State) -> None:
        """Take the first record of this step, with the state it was made in."""
        self.recorded, self.surroundings, self._base = recorded, surroundings, state
        self._accepted = [Accepted(state, {}, None)]

    def now(self, batch: BatchSignature, model: ModelSignature) -> State:
        """Return the state at this call."""
        return State(batch, model, self.surroundings.values())

    def stands(self) -> bool:
        """Return whether tensors outside of the model, and what the step leaves in objects, are as recorded."""
        return self.recorded is None or self.recorded.stands()

    def accepts(self, state: State) -> bool:
        """Return whether the step is known to be valid for this state; if so, use the numbers of this state."""
        for position, known in enumerate(self._accepted):
            if same_state(known.state, state):
                self._accepted.insert(0, self._accepted.pop(position))
                self._use(known.numbers, known.constants)
                return True
        live = self._samples.live
        for known in self._accepted:
            changed = self.changed(state, known.state)
            if changed is None:
                return False
            left = {p: v for p, v in changed.items() if p not in self._ignored}
            if all(p in live and is_number(new) and self._samples.is_ordinary(p, new) for p, (_, new) in left.items()):
                numbers = dict(known.numbers)
                for spot, follows in self._samples.follows.items():
                    if follows is not None and follows.path in left:
                        number = follows.of(left[follows.path][1])
                        if number is None:
                            return False
                        numbers[spot] = number
                self._use(numbers, known.constants)
                return True
        return False

    def changed(self, state: State, since: State | None = None) -> Changed | None:
        """Return what has changed; None where tensors have other forms, or modules another structure."""
        before = since or self._base
        found = batch_changes(before.batch, state.batch)
        model = {} if before.model is state.model else model_changes(before.model, state.model)
        if found is None or model is None:
            return None
        found.update(model)
        pairs = zip(self.surroundings.paths, before.around, state.around, strict=True)
        found.update((path, (old, new)) for path, old, new in pairs if not same_value(old, new))
        return found

    def learn(
        self, state: State, changed: Changed, difference: Difference, surroundings: Surroundings, say: Say
    ) -> None:
        """Learn from a second record, for this state, that differs in numbers alone or not at all."""
        if surroundings.paths != self.surroundings.paths:  # such as after a list has grown or an object was replaced
            state = self._look_anew(state, surroundings)
        self._samples.add(changed, difference.numbers)
        names = self._names()
        if names != self.names:
            self.names = names
            self.version += 1
        numbers = {spot: now for spot, (_, now) in difference.numbers.items()}
        self._accepted.insert(0, Accepted(state, numbers, difference.constants))
        del self._accepted[STATES:]
        self._use(numbers, difference.constants)
        if difference.constants is None and all(f is not None for f in self._samples.follows.values()):
            matters = {follows.path for follows in self._samples.follows.values() if follows is not None}
            self._ignore(changed.keys() - matters, say)

    def _look_anew(self, state: State, surroundings: Surroundings) -> State:
        """Watch what the second record read from now on, and take what was not watched before as unchanged."""
        known = dict(zip(self.surroundings.paths, self._base.around, strict=True))
        around = surroundings.values()
        base = tuple(known.get(path, value) for path, value in zip(surroundings.paths, around, strict=True))
        self.surroundings, self._base, self._accepted = surroundings, self._base._replace(around=base), []
        return state._replace(around=around)

    def _ignore(self, harmless: set[str], say: Say) -> None:
        """Ignore values from now on that have changed often enough without an effect on the step."""
        found = []
        for path in sorted(harmless - self._ignored):
            values = self._samples.values(path)
            if len(values) >= (2 if isinstance(values[0], bool) else ENOUGH):
                self._ignored.add(path)
                found.append(path)
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            say(
                f"{', '.join(found[:3])}{more}: other at each call, and the step is the same, so that it is no longer "
                "looked at."
            )

    def _names(self) -> dict[Spot, str]:
        """Name the numbers that are read at each call; numbers that follow from one value in one way share a name."""
        names: dict[Spot, str] = {}
        for position, (spot, follows) in enumerate(self._samples.follows.items()):
            names[spot] = follows.text if follows is not None else f"number {position}"
        return names

    def _use(self, numbers: Mapping[Spot, Number], constants: list[Constant] | None) -> None:
        self.constants = constants
        self.numbers.clear()  # programs read this very dictionary
        self.numbers.update({name: numbers.get(spot, self._samples.base[spot]) for spot, name in self.names.items()})

    def marked(self) -> Recorded:
        """Return the record with names in place of the numbers that are read at each call."""
        assert self.recorded is not None
        return marked(self.recorded, self.names) if self.names else self.recorded


class Live:
    """Finds the recorded step for a batch, and records it where there is none.

    Attributes:
        traced: recorded steps, the one found last first.
        watch: computes the model's signature.
    """

    def __init__(
        self, model: nn.Module, roots: Mapping[str, Any], record: Record, say: Say, *, most: int = MOST
    ) -> None:
        """Remember at most `most` recorded steps."""
        self._model = model
        self._roots = {"model": model, **roots}
        self._record = record
        self._say = say
        self._most = most
        self.watch = ModelWatch(model)
        self.traced: list[Traced] = []

    def find(self, batch: Any) -> Traced:
        """Return the step for this batch and for everything else as it is now; not recorded yet where its form is new.

        Raises:
            TraceError: it has to be recorded again, and cannot be.
        """
        batch_now, model_now = batch_signature(batch), self.watch.signature()
        alike: list[tuple[Traced, State, Changed]] = []
        forms = tensor_forms(batch_now)
        for position, traced in enumerate(self.traced):
            if traced.forms != forms or not traced.stands():
                continue
            state = traced.now(batch_now, model_now)
            if traced.accepts(state):
                if position:
                    self.traced.insert(0, self.traced.pop(position))
                return traced
            changed = traced.changed(state) if traced.recorded is not None else None
            if changed is not None:
                alike.append((traced, state, changed))
        if not alike:
            return self._new((batch_now, model_now))
        recorded, surroundings = self._trace(batch)
        for traced, state, changed in alike:
            assert traced.recorded is not None
            difference = compare(traced.recorded, recorded)
            if difference is not None and traced.recorded.left == recorded.left:
                traced.learn(state, changed, difference, surroundings, self._say)
                self.traced.remove(traced)
                self.traced.insert(0, traced)
                return traced
        around = surroundings.values()
        apart = tuple((path, _text(value)) for path, value in zip(surroundings.paths, around))
        model_apart = ModelSignature(model_now.modules, model_now.context + apart)
        traced = self._new((batch_now, model_apart))
        traced.begin(recorded, surroundings, State(batch_now, model_now, around))
        return traced

    def recorded(self, key: Key, batch: Any) -> Recorded:
        """Return the tables of a step that `find` has given, recording it if need be."""
        traced = self.of(key)
        if traced.recorded is None:
            recorded, surroundings = self._trace(batch)
            traced.begin(recorded, surroundings, State(*key, surroundings.values()))
            return recorded
        return traced.recorded

    def again(self, key: Key) -> None:
        """Record this step anew when it is next needed."""
        self.of(key).recorded = None

    def forget(self, key: Key) -> None:
        """Forget a step."""
        self.traced = [traced for traced in self.traced if traced.key is not key]

    def of(self, key: Key) -> Traced:
        """Return the step with this very key."""
        return next(traced for traced in self.traced if traced.key is key)

    def _new(self, key: Key) -> Traced:
        self.traced = [traced for traced in self.traced if traced.recorded is not None][: self._most - 1]
        self.traced.insert(0, Traced(key))
        return self.traced[0]

    def _trace(self, batch: Any) -> tuple[Recorded, Surroundings]:
        with executed() as ran:
            recorded = self._record(batch)
        return recorded, watch(self._roots, ran, model=self._model, own=[batch, *tensors_of(batch)])


def _text(value: Any) -> str:
    name = getattr(value, "co_name", None)
    return str(name) if name else value_text(value) or type(value).__name__
