"""H-Partition: what must hold of every hierarchy, and that it is Algorithm 7's partition or a better one."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.flows.benchmarks.scaling.synthetic_graphs import SHAPES, skips, transformer
from stowage.stages.ir.errors import ParameterError, TableError
from stowage.stages.ir.hierarchy import FlowGraph, FlowNode
from stowage.stages.partition.clusters.partition import MOST_LEVELS, Limits, h_partition, partition_score
from tests.matrix import examples
from tests.partition.clusters import algorithm7
from tests.partition.clusters.hierarchies import judge, node_sets


@st.composite
def graphs(draw: st.DrawFn) -> FlowGraph:
    """Chains with branches, skips, several sources and sinks, values that many read or nobody, effects in order."""
    count = draw(st.integers(1, 60))
    nodes: list[FlowNode] = []
    value_bytes = draw(st.lists(st.integers(0, 9), max_size=2))  # these enter from outside
    last_effect = -1
    for i in range(count):
        known = len(value_bytes)
        kind = draw(st.integers(0, 9))
        reads: set[int] = set()
        if known and kind != 0:
            reads.add(known - 1 if kind < 7 else draw(st.integers(0, known - 1)))
        if known and draw(st.integers(0, 4)) == 0:
            reads.update(draw(st.lists(st.integers(0, known - 1), max_size=3)))
        sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))
        after: tuple[int, ...] = ()
        if draw(st.integers(0, 7)) == 0:
            after, last_effect = ((last_effect,) if last_effect >= 0 else ()), i
        creates = tuple(range(known, known + len(sizes)))
        nodes.append(FlowNode(tuple(sorted(reads)), creates, draw(st.sampled_from("abc")), after, draw(st.booleans())))
        value_bytes += sizes
    results = draw(st.lists(st.integers(0, len(value_bytes) - 1), max_size=2, unique=True))
    return FlowGraph(nodes, value_bytes, tuple(results))


LIMITS = st.builds(Limits, st.integers(1, 8), st.integers(2, 9), st.sampled_from([0.0, 0.5, 1.0, 1.7]))


@settings(max_examples=examples(120), deadline=None)
@given(graphs(), LIMITS)
def test_every_hierarchy_is_legal_and_no_worse_than_algorithm_7(graph: FlowGraph, limits: Limits) -> None:
    """By the sum of equation 3.1 over all clusters below the top, where Algorithm 7 keeps to its limits."""
    hierarchy = h_partition(graph, limits)
    judge(hierarchy, limits)
    assert h_partition(graph, limits) == hierarchy
    reference = algorithm7.partition(graph, limits.top_size, limits.size, limits.alpha, most_levels=MOST_LEVELS)
    if reference is not None:
        clusters, _ = reference
        theirs = sum(algorithm7.score(graph, c, limits.alpha) for c in clusters)
        assert partition_score(hierarchy) <= theirs * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_where_algorithm_7_advances_its_partition_is_found(seed: int) -> None:
    """The same clusters, not only the same score: one source, short skips, levels that shrink."""
    graph = skips(70, seed=seed, share=0.1, longest=4)
    limits = Limits(top_size=4 + seed % 3, size=5 + seed % 4)
    reference = algorithm7.partition(graph, limits.top_size, limits.size, limits.alpha)
    assert reference is not None
    hierarchy = h_partition(graph, limits)
    sets = node_sets(hierarchy)
    mine = [sets[len(graph.nodes) + c.cluster] for c in hierarchy.clusters[:-1]]
    assert sorted(map(sorted, mine)) == sorted(map(sorted, reference[0]))
    assert [sets[m] for m in hierarchy.top.children] == reference[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_like_models_are_legal(shape: str) -> None:
    graph = SHAPES[shape](900)
    assert 600 <= len(graph.nodes) <= 1000
    judge(h_partition(graph), Limits())


@pytest.mark.parametrize("shape", SHAPES)
def test_levels_are_few_whatever_the_shape(shape: str) -> None:
    """Also where no candidate of Algorithm 7 is small; so memory, time and levels of planning stay in bounds."""
    hierarchy = h_partition(SHAPES[shape](10_000))
    assert hierarchy.top.level <= 5
    assert len(hierarchy.top.children) <= 30
    assert len(hierarchy.clusters) <= 10_000 / 5


def test_a_long_chain_needs_no_recursion() -> None:
    nodes = [FlowNode((i - 1,) if i else (), (i,), "same") for i in range(30_000)]
    hierarchy = h_partition(FlowGraph(nodes, [8] * len(nodes), (len(nodes) - 1,)))
    assert hierarchy.nodes_of(hierarchy.top) == list(range(30_000))
    assert len({c.cluster_hash for c in hierarchy.clusters}) <= 12


def test_a_node_with_thousands_of_inputs_and_a_value_that_thousands_read() -> None:
    fan = range(1, 2001)
    nodes = [FlowNode((), (0,), "source", enters=True)]
    nodes += [FlowNode((0,), (i,), "middle") for i in fan]
    nodes += [FlowNode(tuple(fan), (2001,), "sink")]
    hierarchy = h_partition(FlowGraph(nodes, [1] * 2002, (2001,)))
    assert len(hierarchy.top.children) <= 30
    assert all(len(c.children) <= 20 for c in hierarchy.clusters[:-1])
    assert len({c.cluster_hash for c in hierarchy.clusters}) <= 20


@pytest.mark.parametrize("layers", [13, 24, 37])
def test_repeated_layers_give_few_distinct_clusters_at_every_level(layers: int) -> None:
    hierarchy = h_partition(transformer(16 * layers + 21))
    per_level: dict[int, set[str]] = {}
    for c in hierarchy.clusters:
        per_level.setdefault(c.level, set()).add(c.cluster_hash)
    assert len(hierarchy.clusters) > layers
    assert all(len(hashes) <= 5 for hashes in per_level.values())


def test_equal_clusters_have_equal_graphs_and_names_do_not_count() -> None:
    hierarchy = h_partition(transformer(600))
    by_hash: dict[str, list[int]] = {}
    for c in hierarchy.clusters:
        by_hash.setdefault(c.cluster_hash, []).append(c.cluster)
    repeated = [numbers for numbers in by_hash.values() if len(numbers) > 1]
    assert repeated
    for numbers in repeated:
        first, *others = (hierarchy.graph_of(hierarchy.clusters[n]) for n in numbers)
        for other in others:
            assert [c[1:] for c in other.children] == [c[1:] for c in first.children]
            assert (other.value_bytes, other.inputs, other.outputs) == (first.value_bytes, first.inputs, first.outputs)


def test_a_different_node_size_or_result_makes_a_different_cluster() -> None:
    def top_hash(keys: str = "abc", sizes: tuple[int, ...] = (1, 2, 3), results: tuple[int, ...] = (2,)) -> str:
        nodes = [FlowNode((i - 1,) if i else (), (i,), key) for i, key in enumerate(keys)]
        return h_partition(FlowGraph(nodes, sizes, results)).top.cluster_hash

    cases = {top_hash(), top_hash("abd"), top_hash(sizes=(1, 2, 4)), top_hash(results=(1, 2)), top_hash(results=())}
    assert len(cases) == 5


def test_what_depends_on_nothing_goes_with_its_first_reader() -> None:
    """A drawn mask and a cast weight beside every node of a chain: all sources; without them a chain of 60."""
    nodes: list[FlowNode] = []
    x = -1
    for i in range(60):
        mask = len(nodes)
        nodes.append(FlowNode((), (mask,), "draw", after=(mask - 2,) if i else ()))
        x = mask + 1
        nodes.append(FlowNode((mask, x - 2) if i else (mask,), (x,), "use", enters=i == 0))
    graph = FlowGraph(nodes, [4] * len(nodes), (x,))
    limits = Limits(top_size=5, size=8)
    hierarchy = h_partition(graph, limits)
    judge(hierarchy, limits)
    sets = node_sets(hierarchy)
    lowest = [sets[120 + c.cluster] for c in hierarchy.clusters if c.level == 1]
    assert all((n ^ 1) in inside for inside in lowest for n in inside)
    reference = algorithm7.partition(graph, 5, 8, 0.5)
    assert reference is not None
    assert partition_score(hierarchy) < 0.7 * sum(algorithm7.score(graph, c, 0.5) for c in reference[0])


def test_order_of_effects_is_part_of_convexity() -> None:
    """Two branches that draw in turns cannot be two clusters that run one after the other."""
    nodes = [FlowNode((), (0,), "source", enters=True)]
    for i in range(8):
        before = len(nodes) - 2 if i else 0
        nodes.append(FlowNode((max(before, 0),), (len(nodes),), "draw", after=(len(nodes) - 1,)))
    graph = FlowGraph(nodes, [1] * len(nodes), (7, 8))
    limits = Limits(top_size=3, size=4)
    hierarchy = h_partition(graph, limits)
    judge(hierarchy, limits)
    assert hierarchy.nodes_of(hierarchy.top) == list(range(9))


def test_no_partition_under_four_nodes() -> None:
    nodes = [FlowNode((i - 1,) if i else (), (i,), "k") for i in range(3)]
    graph = FlowGraph(nodes, [1, 1, 1], (2,))
    assert [c.children for c in h_partition(graph, Limits(top_size=1)).clusters] == [(0, 1, 2)]
    assert h_partition(FlowGraph([], [], ())).top.children == ()


@pytest.mark.parametrize(
    "graph",
    [
        FlowGraph([FlowNode((1,), (0,), "a"), FlowNode((), (1,), "b")], [1, 1]),
        FlowGraph([FlowNode((), (0,), "a"), FlowNode((), (0,), "b")], [1]),
        FlowGraph([FlowNode((), (0,), "a")], [1], (3,)),
        FlowGraph([FlowNode((0,), (0,), "a")], [1]),
        FlowGraph([FlowNode((), (0,), "a", after=(0,))], [1]),
    ],
)
def test_a_graph_that_is_none_is_refused(graph: FlowGraph) -> None:
    with pytest.raises(TableError, match="forward graph"):
        h_partition(graph)


def test_limits_that_cannot_hold_are_refused() -> None:
    for wrong in ({"size": 1}, {"top_size": 0}, {"alpha": -0.5}):
        with pytest.raises(ParameterError, match="Clusters need a size of 2"):
            Limits(**wrong)


def test_the_reference_finds_the_clusters_of_a_diamond() -> None:
    """By hand: a → b, c → d. Values of 1 byte; pairs cost 2 · √2 at best, {b, c} as much as three."""
    nodes = [FlowNode((), (0,), "a"), FlowNode((0,), (1,), "b"), FlowNode((0,), (2,), "c"), FlowNode((1, 2), (3,), "d")]
    graph = FlowGraph(nodes, [1] * 4, (3,))
    level = algorithm7.quotient(algorithm7.dependencies(graph), [frozenset([n]) for n in range(4)])
    assert nx.is_directed_acyclic_graph(level)
    found = algorithm7.candidates(level, 4)
    assert set(found) == {frozenset(s) for s in ({0, 1}, {0, 2}, {0, 1, 2, 3}, {1, 2, 3}, {0, 1, 2}, {1, 2})}
    assert algorithm7.score(graph, frozenset([1, 2]), 0.5) == 3 * 2**0.5
