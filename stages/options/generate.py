"""From schedules to the options of a block: judged by the referee, dominated ones dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.plan import Option
from stowage.stages.options.encoding import encode
from stowage.stages.options.tasks import Found, GridSize, grid, row, sweep
from stowage.stages.simulate.block import replay_block
from stowage.stages.solver.outcome import SolverSettings

_FIXED = ("keep_all", "recompute_all")
_COUNTED_SAME = 1e-12


def generate_options(
    graph: BlockGraph,
    *,
    peak_budgets: int = 6,
    save_budgets: int = 6,
    time_limit_s: float = 5.0,
    seed: int = 0,
    max_exact_nodes: int = 80,
    computations: int = 3,
    greedy_levels: int = 24,
) -> list[Option]:
    """All options of one block, fastest first (thesis 2.6.0.0.1).

    Args:
        graph: the block.
        peak_budgets, save_budgets: values of M_peak and M_save to solve for.
        time_limit_s: of each solve, deterministic seconds of CP-SAT.
        seed: of the solver.
        max_exact_nodes: blocks with more nodes get the greedy frontier instead.
        computations: of one node at most, in exact solving.
        greedy_levels: peak budgets of the greedy frontier.

    Returns:
        Options with the referee's numbers; keep-all and recompute-all are always among them, and of the others none
        is dominated in total time, bytes saved, forward peak and backward peak together.
    """
    size = GridSize(peak_budgets, save_budgets, computations, max_exact_nodes, greedy_levels)
    settings = SolverSettings(time_limit_s=time_limit_s, seed=seed)
    if len(graph.nodes) > max_exact_nodes:
        return options_of(graph, sweep(graph, size))
    budgets = grid(graph, size, settings)
    found = [*budgets.found]
    for peak in budgets.peaks:
        found.extend(row(graph, peak, budgets.saves, size, settings))
    return options_of(graph, found)


def options_of(graph: BlockGraph, found: Iterable[Found]) -> list[Option]:
    """Replay every schedule and keep the options worth having, numbered fastest first.

    Raises:
        IllegalPlanError: a schedule is illegal (a formulation's bug).
    """
    block_hash = graph.content_hash()
    judged: dict[tuple[tuple[int, ...], tuple[int, ...], bool], Option] = {}
    for one in found:
        cost = replay_block(graph, one.schedule)
        option = Option(
            block_hash=block_hash,
            option=0,
            forward=encode(one.schedule.forward),
            backward=encode(one.schedule.backward),
            forward_time_s=cost.forward_time_s,
            backward_time_s=cost.backward_time_s,
            save_bytes=cost.save_bytes,
            forward_peak_bytes=cost.forward_peak_bytes,
            backward_peak_bytes=cost.backward_peak_bytes,
            recomputed_bytes=cost.recomputed_bytes,
            formulation=one.report.formulation,
            status=one.report.status,
            gap=one.report.gap,
        )
        key = (option.forward, option.backward, option.formulation in _FIXED)
        if key not in judged or option.gap < judged[key].gap:
            judged[key] = option
    return [
        Option(**{**option.__dict__, "option": position})
        for position, option in enumerate(_undominated(list(judged.values())))
    ]


def _undominated(options: Sequence[Option]) -> list[Option]:
    """Fixed policies, and what no other option is no worse than in every respect; fastest first."""
    ordered = sorted(options, key=lambda o: (*_costs(o), o.formulation not in _FIXED, o.gap, o.forward, o.backward))
    kept: list[Option] = []
    for option in ordered:
        if option.formulation in _FIXED or not any(_no_worse(_costs(other), _costs(option)) for other in kept):
            kept.append(option)
    return kept


def _costs(option: Option) -> tuple[float, int, int, int]:
    time_s = round(option.forward_time_s + option.backward_time_s, 12)
    return time_s, option.save_bytes, option.forward_peak_bytes, option.backward_peak_bytes


def _no_worse(one: tuple[float, int, int, int], two: tuple[float, int, int, int]) -> bool:
    return all(a <= b + _COUNTED_SAME for a, b in zip(one, two, strict=True))
