"""Reads the card's clocks from its driver: a card that is warm, or short of power, is slower than it was."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
UNITS = ("MHz", "MHz of memory", "°C", "W")

PATIENCE_S = 10.0
"""Seconds to wait for an answer of `nvidia-smi`."""


def clocks_now() -> str:
    """Return the used card's clocks now: `1980 MHz, 2619 MHz of memory, 41 °C, 350 W`; empty where they are unknown."""
    found = _asked(FIELDS)
    return ", ".join(f"{value} {unit}" for value, unit in zip(found, UNITS) if _is_number(value))


def driver() -> str:
    """Return the version of the card's driver; empty where it is unknown."""
    return next(iter(_asked(("driver_version",))), "")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9.]+", text) is not None


def _asked(fields: tuple[str, ...]) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    card = ["-i", visible] if visible else []
    command = [program, *card, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    first = next(iter(done.stdout.splitlines()), "")
    return [value.strip() for value in first.split(",")]
