"""The methods by which the plan of an iteration is made: one row each, and everything that depends on it.

A new method is a row of `METHODS`. `fit`, `params.yaml` and the stages know it by its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stowage.stages.ir.errors import ParameterError


@dataclass(frozen=True)
class Method:
    """One way to make a plan.

    Attributes:
        name: how people ask for it.
        meaning: what it does, in a few words.
        races: everything that applies takes part, and the fastest that fits wins.
        whole: the whole step is one block.
        compared: it is there to compare with, and must not borrow from others.
        fixed: it is a policy, whatever the budget.
        keeps: it computes nothing again where everything fits.
        offloads: plans that keep everything in the device do not count.
        whole_blocks: it offloads whole blocks, out of three options each.
        polishes: what still fits is kept instead of made again.
        only: schedules of blocks by this formulation alone are options.
        without: formulations whose schedules of blocks are not.
        clusters: the formulation of clusters; None takes what is asked for elsewhere.
        sizes: M^t and M^l of the clusters, where nobody asks for others; None for the defaults.
        public: people are told of it.
    """

    name: str
    meaning: str
    races: bool = False
    whole: bool = False
    compared: bool = False
    fixed: bool = False
    keeps: bool = False
    offloads: bool = False
    whole_blocks: bool = False
    polishes: bool = True
    only: str | None = None
    without: tuple[str, ...] = ()
    clusters: str | None = None
    sizes: tuple[int, int] | None = None
    public: bool = True

    def takes(self, formulation: str) -> bool:
        """Whether schedules of blocks that a formulation found are options."""
        return formulation not in self.without if self.only is None else formulation == self.only

    @property
    def recomputes_only(self) -> bool:
        """Whether plans that use the tier below do not count."""
        return not self.races and not self.offloads


_BLOCK_HEURISTICS = ("selective", "tw_remat")
"""Formulations of a block that take any number of nodes: with them a method would not be its clusters alone."""

METHODS = (
    Method("auto", "the fastest of everything that applies", races=True, keeps=True),
    Method("rockmate", "RK-Rotor's best chain of blocks", keeps=True),
    Method("hiremate", "the whole step as one block, solved by clusters and greedy rules", whole=True, keeps=True),
    Method("offmate", "the best plan that offloads", offloads=True),
    Method("rotor", "a block is kept whole or not at all", compared=True, polishes=False, only="keep_all"),
    Method(
        "h_ilp",
        "the whole step as one block, solved by clusters with H-ILP (thesis 3.4) alone",
        whole=True,
        compared=True,
        without=_BLOCK_HEURISTICS,
        clusters="h_ilp",
        # HiGHS finds answers within 5 s for up to some 25 nodes, forward and backward, and seldom for more.
        sizes=(12, 8),
    ),
    Method(
        "h_retention",
        "the whole step as one block, solved by clusters with retention intervals alone",
        whole=True,
        compared=True,
        without=_BLOCK_HEURISTICS,
        clusters="h_retention",
    ),
    Method("tw_remat", "the whole step as one block, by TW-Remat alone", whole=True, compared=True, only="tw_remat"),
    Method("recompute_all", "every block is computed again", fixed=True, polishes=False),
    Method("chen_sqrt", "√n checkpoints", fixed=True, polishes=False),
    Method("offmate_preprint", "whole blocks are offloaded", offloads=True, whole_blocks=True, public=False),
)
"""In the order in which people are told of them."""

NAMES = tuple(m.name for m in METHODS)
"""Of all."""

PUBLIC = tuple(m.name for m in METHODS if m.public)

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[PUBLIC]
"""The name of a method that people are told of, as settings check it."""


def method_of(name: str) -> Method:
    """The method of that name.

    Raises:
        ParameterError: there is none.
    """
    for method in METHODS:
        if method.name == name:
            return method
    raise ParameterError(f"method is one of {', '.join(PUBLIC)}, not {name!r}.")
