"""Hashes of blocks, and the sentences of errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from stowage.stages.ir.block import BlockGraph, SolveReport
from stowage.stages.ir.errors import MIB, Infeasible, Occupant, size_text
from tests.matrix import examples
from tests.strategies import attention_block, small_blocks


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(small_blocks())
def test_a_block_comes_back_from_json(graph: BlockGraph) -> None:
    found = BlockGraph.from_json(graph.to_json())
    assert found == graph
    assert found.content_hash() == graph.content_hash()


def test_names_are_not_in_the_hash_and_everything_else_is() -> None:
    graph = attention_block()
    renamed = replace(
        graph,
        nodes=tuple(replace(n, name=f"other {n.name}") for n in graph.nodes),
        allocations=tuple(replace(a, name="x") for a in graph.allocations),
    )
    assert renamed.content_hash() == graph.content_hash()
    node, allocation = graph.nodes[3], graph.allocations[2]
    changes = [
        replace(graph, nodes=(*graph.nodes[:3], changed, *graph.nodes[4:]))
        for changed in (
            replace(node, time_s=node.time_s * 2),
            replace(node, workspace_bytes=node.workspace_bytes + 1),
            replace(node, once=not node.once),
            replace(node, reads=()),
        )
    ]
    changes.append(
        replace(graph, allocations=(*graph.allocations[:2], replace(allocation, nbytes=1), *graph.allocations[3:]))
    )
    changes.append(replace(graph, forward_count=graph.forward_count - 1))
    changes.append(replace(graph, outgoing=()))
    changes.append(replace(graph, output=()))
    changes.append(replace(graph, incoming=()))
    hashes = [g.content_hash() for g in [graph, *changes]]
    assert len(set(hashes)) == len(hashes)


def test_who_creates_and_who_reads() -> None:
    graph = attention_block()
    for allocation, node in graph.creator().items():
        assert allocation in graph.nodes[node].creates
    assert not graph.creator().keys() & set(graph.incoming)
    for allocation, readers in graph.readers().items():
        assert readers == [k for k, n in enumerate(graph.nodes) if allocation in n.reads]


def test_gap_of_a_solve() -> None:
    assert SolveReport("x", "feasible", 4.0, 3.0).gap == 0.25
    assert SolveReport("x", "optimal", 4.0, 4.0).gap == 0.0
    assert SolveReport("x", "optimal", 0.0, 0.0).gap == 0.0
    assert SolveReport("x", "optimal", 4.0, 4.0 + 1e-9).gap == 0.0


def test_infeasible_is_one_sentence_with_the_largest_tensors() -> None:
    occupants = [Occupant(f"tensor {i}", (9 - i) * MIB) for i in range(5)]
    error = Infeasible(1000 * MIB, 1234 * MIB + 1, "blocks.3.mlp, backward", occupants)
    text = str(error)
    assert "1,000.0 MiB" in text
    assert "1,234.0 MiB" in text
    assert str(1234 * MIB + 1) in text
    assert "bound at blocks.3.mlp, backward, where" in text
    assert "tensor 0 9.0 MiB, tensor 1 8.0 MiB, tensor 2 7.0 MiB" in text
    assert "tensor 3" not in text
    assert "\n" not in text
    assert text.count(". ") == 0
    assert "nothing" in str(Infeasible(1, 2, "F0"))
    assert "The device budget of 1 byte cannot be met: the smallest feasible budget is 2 bytes" in str(
        Infeasible(1, 2, "F0")
    )
    close = str(Infeasible(200 * MIB + 1000, 200 * MIB + 2000, "F0"))
    assert "of 209,716,200 bytes cannot be met: the smallest feasible budget is 209,717,200 bytes" in close


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (61140, "59.7 KiB"),
        (MIB - 52, "1023.9 KiB"),
        (MIB - 1, "1.0 MiB"),
        (1536 * 1024, "1.5 MiB"),
        (5 << 30, "5,120.0 MiB"),
    ],
)
def test_a_size_shows_its_number(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
