"""Random training steps as tables, without any model: chains with skips, masks, dropout, statistics, in-place calls,
shared and frozen weights, and an update for each weight that trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.trace import Call, Gradient, Phase, Storage, StorageRole, TraceMeta, TraceTables, Value
from stowage.stages.ir.updates import UPDATE, UpdateRule, update_arguments


class StepBuilder:
    """Writes the tables of a step call by call."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.calls: list[Call] = []
        self.gradients: list[Gradient] = []
        self.loss_value = -1

    def _value(self, storage: int, call: int, output: int, name: str, source: str = "") -> int:
        nbytes, name = self.storages[storage].nbytes, name.replace(" ", "_")
        self.values.append(Value(len(self.values), storage, call, output, "uint8", (nbytes,), (1,), 0, name, source))
        return len(self.values) - 1

    def persistent(self, name: str, nbytes: int, role: StorageRole = "parameter") -> int:
        """A value that exists before the step."""
        self.storages.append(Storage(len(self.storages), nbytes, role, name))
        return self._value(len(self.storages) - 1, -1, 0, name, f"{role}:{name}")

    def call(
        self,
        name: str,
        reads: Sequence[int],
        *sizes: int,
        phase: Phase = "forward",
        mutates: Sequence[int] = (),
        random: bool = False,
        replay: bool = False,
        target: str = "aten.op.default",
    ) -> list[int]:
        """A call that makes one storage per size; `mutates` are values whose storages it writes."""
        number = len(self.calls)
        made = []
        for i, size in enumerate(sizes):
            self.storages.append(Storage(len(self.storages), size, "temporary", f"{name}.{i}"))
            made.append(self._value(len(self.storages) - 1, number, i, f"{name}_{i}_of_{number}"))
        self.calls.append(
            Call(
                call=number,
                target=target,
                arguments=json.dumps({"args": [{"value": v} for v in reads], "kwargs": {}}),
                reads=tuple(reads),
                returns=tuple(made),
                returns_many=len(made) > 1,
                mutates=tuple(sorted({self.values[v].storage for v in mutates})),
                is_view=False,
                is_random=random,
                replay_arguments="{}" if replay else "",
                phase=phase,
                module=name,
                location="",
                signature=name,
            )
        )
        return made

    def update(self, name: str, weight: int, gradient: int, state_bytes: int) -> None:
        """The optimizer's update of one weight, with a state of its own."""
        self.storages.append(Storage(len(self.storages), state_bytes, "state", f"{name}::state"))
        state = self._value(len(self.storages) - 1, -1, 0, f"{name}_state")
        self.call(f"update {name}", [gradient, weight], phase="update", mutates=[weight, state], target=UPDATE)
        rule = UpdateRule("torch.optim.sgd:SGD", "{}")
        last = self.calls[-1]
        self.calls[-1] = Call(**{**vars(last), "arguments": update_arguments(name, gradient, rule)})

    def build(self) -> TraceTables:
        """The finished trace, checked."""
        meta = TraceMeta("configuration", "synthetic", "cpu", "0", self.loss_value, "SGD", len(self.gradients))
        trace = TraceTables(self.storages, self.values, self.calls, self.gradients, [], meta)
        trace.check()
        return trace


@st.composite
def training_steps(draw: st.DrawFn, max_layers: int = 9) -> TraceTables:
    """A random step; `costs_for` prices it."""
    b = StepBuilder()
    size = st.integers(1, 40)
    layers = draw(st.integers(1, max_layers))
    features = draw(st.sets(st.sampled_from(["mask", "skip", "dropout", "statistics", "in place", "tied", "frozen"])))
    weights = [b.persistent(f"w{k}", draw(size)) for k in range(layers)]
    if "tied" in features:
        weights[-1] = weights[0]
    trains = {w for w in weights if "frozen" not in features or draw(st.booleans())} or {weights[-1]}
    statistics = b.persistent("statistics", 2, "buffer") if "statistics" in features else -1
    given = b.persistent("input", 3, "input")
    mask = b.call("mask", [given], 5)[0] if "mask" in features else -1

    activations = [given]
    tape: list[dict[str, Any]] = []
    for k in range(layers):
        before = [activations[-1]]
        if "skip" in features and k > 1 and draw(st.booleans()):
            before.append(draw(st.sampled_from(activations[1:-1])))
        reads = [*before, weights[k]] + ([mask] if mask >= 0 else [])
        extra: list[int] = []
        if "dropout" in features and draw(st.booleans()):
            extra = b.call(f"drop{k}", [], draw(size), random=True)
        sizes = [draw(size)] + ([draw(size)] if draw(st.booleans()) else [])
        if statistics >= 0 and draw(st.booleans()):
            made = b.call(f"f{k}", [*reads, statistics, *extra], *sizes, mutates=[statistics], replay=True)
        else:
            made = b.call(f"f{k}", [*reads, *extra], *sizes)
        if "in place" in features and draw(st.booleans()):
            b.call(f"inplace{k}", [made[0]], mutates=[made[0]])
        activations.append(made[0])
        tape.append({"before": before, "phantoms": [*made[1:], *extra], "out": made[0], "weight": weights[k]})
    (b.loss_value,) = b.call("loss", [activations[-1], given], 1)

    def added(known: int | None, new: int, nbytes: int) -> int:
        if known is None:
            return new
        return b.call("add", [known, new], nbytes, phase="backward", target="aten.add.Tensor")[0]

    sizes_of: dict[int, int] = {}
    gradient: dict[int, int] = {activations[-1]: b.call("loss_grad", [b.loss_value], draw(size), phase="backward")[0]}
    of_weight: dict[int, int] = {}
    for k, entry in reversed(list(enumerate(tape))):
        if entry["out"] not in gradient:
            continue
        g = gradient[entry["out"]]
        needs = [g, *entry["phantoms"]] + ([entry["out"]] if draw(st.booleans()) else [])
        for source in entry["before"]:
            if source != given:
                nbytes = sizes_of.setdefault(source, draw(size))
                (gx,) = b.call(f"x{k}_grad", [*needs, entry["weight"]], nbytes, phase="backward")
                gradient[source] = added(gradient.get(source), gx, nbytes)
        if entry["weight"] in trains:
            nbytes = b.storages[b.values[entry["weight"]].storage].nbytes
            (gw,) = b.call(f"w{k}_grad", [*needs, *entry["before"]], nbytes, phase="backward")
            of_weight[entry["weight"]] = added(of_weight.get(entry["weight"]), gw, nbytes)
    for weight, g in of_weight.items():
        b.gradients.append(Gradient(b.values[weight].name, weight, g))
    if draw(st.integers(0, 3)):
        for row in b.gradients:
            nbytes = b.storages[b.values[row.parameter_value].storage].nbytes
            b.update(row.parameter, row.parameter_value, row.gradient_value, 2 * nbytes)
    return b.build()


def costs_for(trace: TraceTables) -> dict[str, Cost]:
    """Made-up costs: time grows with bytes, every fifth call has a workspace; views cost next to nothing."""
    found: dict[str, Cost] = {}
    for call in trace.calls:
        touched = set() if call.is_view else {trace.values[v].storage for v in (*call.reads, *call.returns) if v >= 0}
        nbytes = sum(trace.storages[s].nbytes for s in touched)
        time_s = 1e-8 if call.is_view else 1e-6 + nbytes * 1e-9
        workspace = nbytes // 2 if len(call.signature) % 5 == 0 else 0
        found[call.signature] = Cost(call.signature, "made up", time_s, 0, workspace, 1, "measured")
    return found
