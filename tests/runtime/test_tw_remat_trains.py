"""Models that are no chains train under schedules of TW-Remat with the numbers of plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stowage.stages.formulations.block.tw_remat.solve import tw_remat
from stowage.stages.ir.block import BlockGraph
from stowage.stages.options.generate import options_of
from stowage.stages.options.tasks import Found, fixed_policies
from tests.matrix import some
from tests.runtime.beside_eager import adamw, assert_equal_training
from tests.solve.prepared import prepared_zoo
from tests.zoo import ZOO


@pytest.mark.parametrize("name", some(["t5", "unet"], keep=["unet"]))
def test_the_tightest_plan(name: str) -> None:
    """Dropout is drawn again and batch statistics change once, in whatever order nodes run again."""
    prepared = prepared_zoo(name)
    graphs = {b.block_hash: BlockGraph.from_json(b.graph) for b in prepared.blocks}
    options = [
        option
        for graph in graphs.values()
        for option in options_of(
            graph, [*fixed_policies(graph), *(Found(schedule, report) for schedule, report in tw_remat(graph, 3))]
        )
    ]
    assert any(o.formulation == "tw_remat" for o in options)
    by_treewidth = replace(prepared, options=options)
    solved = by_treewidth.smallest()
    assert solved.summary.recomputed_bytes > 0
    assert_equal_training(ZOO[name], by_treewidth, solved, optimizer=adamw, iterations=2)
