"""The device budget of a run: bytes, or a share of the largest step that was given or seen."""

from __future__ import annotations

from stowage.stages.settings.sizes import parse_percentage, resolve_budget


class RunBudget:
    """A percentage is of the predicted peak of plain PyTorch on the largest batch so far: it may grow, never shrink.

    Attributes:
        nbytes: of the budget so far; 0 before a percentage has met a step.
        grows: it is a percentage.
    """

    def __init__(self, asked: str | int) -> None:
        """
        Raises:
            ParameterError: it is neither a size nor a percentage.
        """
        self._asked = asked
        self.grows = isinstance(asked, str) and asked.strip().endswith("%")
        if self.grows:
            parse_percentage(str(asked), "device_budget")
        self.nbytes = 0 if self.grows else resolve_budget(asked, 0, "device_budget")

    def see(self, eager_peak_bytes: int) -> int:
        """The budget, now that a step is known whose peak in plain PyTorch is so many bytes."""
        self.nbytes = max(self.nbytes, resolve_budget(self._asked, eager_peak_bytes, "device_budget"))
        return self.nbytes
