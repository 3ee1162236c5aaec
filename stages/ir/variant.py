"""Names of variants: by which exact rewrite a trace is computed, and into which chain of blocks it is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PLAIN = "plain"
"""The rewrite that changes nothing."""

HELD: Literal["held"] = "held"
"""The chain around long-lived values, which it holds (see `find_chain` in `partition`)."""

UNHELD: Literal[""] = ""
"""The chain that holds none."""

ChainName = Literal["", "held"]

_BETWEEN = "+"


@dataclass(frozen=True)
class VariantName:
    """The name of a variant, as tables have it.

    Attributes:
        rewrite: the name of an exact rewrite (see `rewrite`).
        chain: the kind of chain.
    """

    rewrite: str = PLAIN
    chain: ChainName = UNHELD

    @property
    def text(self) -> str:
        """What tables say: `plain`, `packed+held`."""
        return _BETWEEN.join(part for part in (self.rewrite, self.chain) if part)

    @staticmethod
    def of(text: str) -> VariantName:
        """The name that a table says; a chain of another kind is none that is known, and stays with the rewrite."""
        rewrite, _, chain = text.partition(_BETWEEN)
        return VariantName(rewrite, HELD) if chain == HELD else VariantName(text)
