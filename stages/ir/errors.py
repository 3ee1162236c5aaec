"""Errors that users see: one clear sentence each, which names the thing and says what to do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

KIB, MIB = 1 << 10, 1 << 20


class StowageError(Exception):
    """Any problem that a user can mend; its text is one sentence."""


class TraceError(StowageError):
    """The model cannot be traced; the text names the module and the line."""


class DrawsElsewhere(TraceError):  # noqa: N818 - one of the refusals of a trace
    """Generators of Python or NumPy advanced while a step was traced."""


class TableError(StowageError):
    """A table on disk is missing, damaged, or not one of ours."""


class ParameterError(StowageError):
    """A parameter in `params.yaml` or an argument of `fit` is wrong."""


class PlanMismatchError(StowageError):
    """A plan, checkpoint or generated step belongs to another model, device or batch."""


class IllegalPlanError(StowageError):
    """The referee rejected a plan: a solver's bug, never the user's fault."""


class NoRoomInLowerTier(StowageError):  # noqa: N818 - a result, as `Infeasible` is
    """The device budget could be met if the lower tier had more room.

    Attributes:
        smallest_feasible_bytes: the smallest budget that the planner can meet with the room that there is.
        needed_bytes: the room in the lower tier that the plan for this budget needs.
    """

    def __init__(self, text: str, smallest_feasible_bytes: int = 0, needed_bytes: int = 0) -> None:
        super().__init__(text)
        self.smallest_feasible_bytes = smallest_feasible_bytes
        self.needed_bytes = needed_bytes

    def of(self, budget_bytes: int, smallest_feasible_bytes: int) -> NoRoomInLowerTier:
        """Return a copy that names another least budget; `budget_bytes` is in the text."""
        del budget_bytes
        return NoRoomInLowerTier(str(self), smallest_feasible_bytes, self.needed_bytes)


class OffloadedError(StowageError):
    """A model was called while its weights are offloaded."""


class RankError(StowageError):
    """Another rank has ended, hangs, has failed or does something else; the text says if all have to start again."""


class StaleStep(StowageError):  # noqa: N818 - what has become of a plan, not a failure of the caller
    """A planned step gave other numbers than plain PyTorch: something that it reads has changed unseen.

    Attributes:
        call: the call of the program that found it, counted from 1.
        agreed: the latest call before it that was compared and agreed; 0 where there is none.
    """

    def __init__(self, text: str, call: int = 0, agreed: int = 0) -> None:
        super().__init__(text)
        self.call = call
        self.agreed = agreed


def size_text(nbytes: int) -> str:
    """Format bytes for messages, in a unit that shows the number: `17 bytes`, `59.7 KiB`, `1,259.3 MiB`."""
    if abs(nbytes) < KIB:
        return f"{nbytes} byte{'s' if abs(nbytes) != 1 else ''}"
    if abs(nbytes) < MIB - KIB // 20:  # from here on it would round to 1,024.0 KiB
        return f"{nbytes / KIB:.1f} KiB"
    return f"{nbytes / MIB:,.1f} MiB"


def size_texts(*sizes: int) -> list[str]:
    """Format sizes by `size_text`, all in bytes where two different sizes would have the same text."""
    texts = [size_text(nbytes) for nbytes in sizes]
    if len(set(texts)) == len(set(sizes)):
        return texts
    return [f"{nbytes:,} bytes" for nbytes in sizes]


STAGING = "staging buffers of the lower tier"


@dataclass(frozen=True)
class Occupant:
    """A part of a peak: a tensor, an operator's workspace, or `STAGING`."""

    name: str
    nbytes: int


@dataclass
class Infeasible(StowageError):  # noqa: N818 - a result, named as in the design
    """No plan fits the budget: a result, not a crash.

    Attributes:
        budget_bytes: the budget that was asked for.
        smallest_feasible_bytes: the smallest whole-iteration budget that the planner can meet.
        binding_step: module and pass in which the smallest plan reaches its peak: `blocks.5.mlp, backward`.
        occupants: what takes memory there, largest first: tensors, workspace, staging buffers.
        mode: `training` or `evaluation`, where that is known.
        form: shapes of the batch, where they are known.
    """

    budget_bytes: int
    smallest_feasible_bytes: int
    binding_step: str
    occupants: list[Occupant] = field(default_factory=list)
    mode: str = ""
    form: str = ""

    def of(self, budget_bytes: int, smallest_feasible_bytes: int) -> Infeasible:
        """Return a copy that names other budgets: the one that was asked for, and the least."""
        return replace(self, budget_bytes=budget_bytes, smallest_feasible_bytes=smallest_feasible_bytes)

    def about(self, mode: str, form: str) -> Infeasible:
        """Return a copy that names a mode and the shapes of a batch."""
        return Infeasible(
            self.budget_bytes, self.smallest_feasible_bytes, self.binding_step, self.occupants, mode, form
        )

    def __post_init__(self) -> None:
        super().__init__(str(self))

    def __str__(self) -> str:
        largest = ", ".join(f"{o.name} {size_text(o.nbytes)}" for o in self.occupants[:3])
        budget, smallest = size_texts(self.budget_bytes, self.smallest_feasible_bytes)
        return (
            f"The device budget of {budget} cannot be met{self._where()}: the smallest feasible budget is "
            f"{smallest}{'' if 'byte' in smallest else f' ({self.smallest_feasible_bytes} bytes)'}, bound at "
            f"{self.binding_step}, where most is taken by {largest or 'nothing'}; raise the budget, or "
            f"{self._remedy()}."
        )

    def _remedy(self) -> str:
        if self.occupants and self.occupants[0].name == STAGING:
            return "leave out `offload_dir`, without which there are no such buffers"
        return "make the batch or the model smaller"

    def _where(self) -> str:
        """Return the mode and the batch as text, as far as they are known."""
        mode = f" in {self.mode}" if self.mode else ""
        return mode + (f" with a batch of {self.form}" if self.form else "")


NO_PLAN = (Infeasible, NoRoomInLowerTier)
"""What planning ends with where no plan fits, each with the least budget that has one."""
