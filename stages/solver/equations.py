"""Adds the equations of a paper as constraints of a MILP, each named by its number in the paper."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

Constraints = Iterator[tuple[str, Any]]
"""Constraints of one equation: a suffix that distinguishes each (empty for a single one), and the constraint."""

Model = TypeVar("Model")


def constraint_prefix(number: str) -> str:
    """Return the prefix of an equation's constraints: `eq_3_7` for 3.7, or the name of an equation without a number."""
    numbered = number[0].isdigit() or "." in number
    return f"eq_{number.lower().replace('.', '_')}" if numbered else number


def add_equations(
    problem: Any,
    equations: Mapping[str, Callable[[Model], Constraints]],
    model: Model,
    leave_out: Collection[str] = (),
) -> None:
    """Add the constraints of all equations to a `pulp.LpProblem`.

    Args:
        problem: the problem that they are added to.
        equations: the function that writes the constraints, by number or name.
        model: data and variables, as those functions take them.
        leave_out: numbers of equations to leave out.
    """
    for number, equation in equations.items():
        if number in leave_out:
            continue
        prefix = constraint_prefix(number)
        for name, constraint in equation(model):
            problem += constraint, f"{prefix}_{name}" if name else prefix
