"""Writes what was recorded as text, by which ranks compare their steps."""

from __future__ import annotations

from stowage.stages.trace.forward import RecordedForward
from stowage.stages.trace.step import Recorded


def recorded_text(recorded: Recorded | RecordedForward) -> str:
    """Return everything that plans depend on of a recorded step or forward, one line for each part of it."""
    return "\n".join(
        [
            *(
                f"{c.target.removesuffix('.default')} of {c.module or 'the loss'} with {c.arguments}"
                for c in recorded.calls
            ),
            *map(repr, recorded.values),
            *map(repr, recorded.storages),
            *(f"constant {c.value}: {c.content!r}" for c in recorded.constants),
        ]
    )
