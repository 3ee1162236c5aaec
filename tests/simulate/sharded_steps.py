"""A sharded step by hand: layers that gather their weights, and scatter their gradients before they are updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import Storage
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.program import StepProgram


@dataclass(frozen=True)
class Layer:
    """Bytes and seconds of one layer."""

    weight: int
    activation: int
    compute_s: float
    collective_s: float


def node(number: int, name: str, phase: str, **content: object) -> ComputeNode:
    fields = {
        "calls": (),
        "reads": (),
        "creates": (),
        "mutates": (),
        "block": 0,
        "once": False,
        "random": False,
        "time_s": 1.0,
        "workspace_bytes": 0,
        "estimated": False,
    }
    return ComputeNode(node=number, name=name, phase=phase, **{**fields, **content})  # type: ignore[arg-type]


def sharded_step(layers: Sequence[Layer], ranks: int = 2) -> StepProgram:
    """Forward, loss, backward; each weight is gathered before forward, each gradient scattered before its update."""
    storages: list[Storage] = []
    nodes: list[ComputeNode] = []

    def storage(nbytes: int, role: str, name: str) -> int:
        storages.append(Storage(len(storages), nbytes, role, name))  # type: ignore[arg-type]
        return storages[-1].storage

    def add(name: str, phase: str, **content: object) -> None:
        nodes.append(node(len(nodes), name, phase, **content))

    shards = [storage(layer.weight // ranks, "parameter", f"w{i}") for i, layer in enumerate(layers)]
    x = storage(4, "input", "x")
    whole, activations = [], [x]
    for i, layer in enumerate(layers):
        whole.append(storage(layer.weight, "temporary", f"w{i}.whole"))
        activations.append(storage(layer.activation, "temporary", f"a{i}"))
        add(
            f"gather {i}",
            "forward",
            reads=(shards[i],),
            creates=(whole[i],),
            time_s=layer.collective_s,
            collective=True,
        )
        reads = tuple(sorted((whole[i], activations[i])))
        add(f"layer {i}", "forward", reads=reads, creates=(activations[i + 1],), time_s=layer.compute_s)
    loss = storage(4, "temporary", "loss")
    flowing = storage(layers[-1].activation, "temporary", "gradient of loss")
    add("loss", "forward", reads=(activations[-1],), creates=(loss,), once=True)
    add("loss backward", "backward", reads=(activations[-1],), creates=(flowing,))
    for i, layer in reversed(list(enumerate(layers))):
        gradient = storage(layer.weight, "temporary", f"g{i}")
        own = storage(layer.weight // ranks, "temporary", f"g{i}.shard")
        before = flowing
        flowing = storage(max(layer.activation, 1), "temporary", f"gradient of a{i}")
        reads = tuple(sorted((whole[i], activations[i], before)))
        add(f"layer {i} backward", "backward", reads=reads, creates=(gradient, flowing), time_s=2 * layer.compute_s)
        scatter = {"time_s": layer.collective_s, "workspace_bytes": layer.weight, "collective": True}
        add(f"scatter {i}", "update", reads=(gradient,), creates=(own,), **scatter)
        add(f"update {i}", "update", reads=(own, shards[i]), mutates=(shards[i],), once=True, time_s=0.1)
    return StepProgram(storages, nodes, frozenset({loss}))


def in_order(program: StepProgram) -> list[Execution]:
    """Every node once."""
    return [Execution(n.node, "step") for n in program.nodes]
