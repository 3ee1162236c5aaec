"""The equations of a paper as the constraints of a MILP, each bearing the number that the paper gives it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

Constraints = Iterator[tuple[str, Any]]
"""Constraints of one equation: what tells each from the others (empty where there is one), and the constraint."""

Model = TypeVar("Model")


def constraint_prefix(number: str) -> str:
    """How the names of an equation's constraints begin: `eq_3_7` for 3.7; equations without a number have names."""
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
        problem: what they are added to.
        equations: number or name -> the function that writes the constraints.
        model: data and variables, as those functions take them.
        leave_out: numbers of equations that this model does without.
    """
    for number, equation in equations.items():
        if number in leave_out:
            continue
        prefix = constraint_prefix(number)
        for name, constraint in equation(model):
            problem += constraint, f"{prefix}_{name}" if name else prefix
