"""The methods that make the plan of an iteration: one row each, with everything that depends on the method.

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
        name: the name by which people ask for it.
        meaning: what it does, in a few words.
        compares_all: every method that applies takes part, and the fastest plan that fits is taken.
        whole: it takes the whole step as one block.
        compared: it is there for comparison, and must not use schedules of others.
        fixed: it is a policy that ignores the budget.
        keeps: it recomputes nothing where everything fits.
        offloads: it makes plans that offload; those that keep everything on the device do not count.
        whole_blocks: it offloads whole blocks, with three options for each.
        polishes: afterwards it keeps what still fits instead of recomputing it.
        only: the only formulation whose schedules of blocks are options.
        without: formulations whose schedules of blocks are no options.
        clusters: the formulation that solves clusters; None for the one in the settings.
        sizes: M^t and M^l of the clusters, where the settings have none; None for the defaults.
        public: users may ask for it, and messages list it.
    """

    name: str
    meaning: str
    compares_all: bool = False
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
        """Say whether schedules of blocks that a formulation found are options."""
        return formulation not in self.without if self.only is None else formulation == self.only

    @property
    def recomputes_only(self) -> bool:
        """Return whether plans that use the lower tier do not count."""
        return not self.compares_all and not self.offloads


_BLOCK_HEURISTICS = ("selective", "tw_remat")
"""Formulations of a block that take any number of nodes; with them a method would not show its clusters alone."""

METHODS = (
    Method("auto", "the fastest of everything that applies", compares_all=True, keeps=True),
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
    Method("keep_all", "everything is kept", fixed=True, polishes=False, public=False),
    Method("offmate_preprint", "whole blocks are offloaded", offloads=True, whole_blocks=True, public=False),
)
"""All methods, in the order in which messages list them."""

NAMES = tuple(m.name for m in METHODS)
"""Names of all methods."""

PUBLIC = tuple(m.name for m in METHODS if m.public)

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[PUBLIC]
"""Type of the name of a public method, which settings check."""


def method_of(name: str) -> Method:
    """Return the method of a name.

    Raises:
        ParameterError: there is none.
    """
    for method in METHODS:
        if method.name == name:
            return method
    raise ParameterError(f"method is one of {', '.join(PUBLIC)}, not {name!r}.")
