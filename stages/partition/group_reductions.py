"""Says when FSDP2 reduces each group's gradients, and which gradient it frees last."""

from __future__ import annotations

from collections.abc import Set

from stowage.stages.partition.group_members import ROOT, Groups, Modules


class Reductions:
    """When FSDP2 frees each group's weights and reduces its gradients.

    FSDP2 learns that a group's part of backward has ended from the gradients of what the group has read. Where none of
    that needs one, such as the tokens that an embedding reads, it frees and reduces after the root, at the end of
    backward, in the order of the modules.
    """

    def __init__(self, groups: Groups, modules: Modules, gradients: Set[str]) -> None:
        self._groups, self._modules, self._gradients = groups, modules, gradients
        self._place: dict[tuple[str, str], int] = {}
        for place, (owner, name) in enumerate(modules.collected):
            self._place.setdefault((groups.of(owner), name), place)
        late = {p for p in groups.order if p != ROOT and (p not in modules.taking or self.is_idle(p))}
        self._turns = {path: i for i, path in enumerate((p for p in modules.paths if p in late), start=1)}

    def last(self, path: str) -> str:
        """Return the last parameter of a group that has a gradient, in FSDP2's order; "" where none has one."""
        names = [n for n in self._groups.members[path] if n in self._gradients]
        return max(names, key=lambda name: self._place[path, name], default="")

    def after_root(self, path: str) -> int:
        """Return the turn of a group among those that are reduced after the root, from 1; 0 for all others."""
        return self._turns.get(path, 0)

    def is_idle(self, path: str) -> bool:
        """Say whether a group other than the root returns nothing that needs a gradient."""
        return path != ROOT and path not in self._modules.returning
