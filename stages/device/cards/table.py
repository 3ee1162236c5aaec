"""Describes cards as devices, with rates that kernels reach, from peaks and efficiencies."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import MIB, ParameterError
from stowage.stages.ir.table import record_of

GB = 1e9
"""Bytes of a gigabyte as data sheets count."""

LANE_GB_S = {"3.0": 0.985, "4.0": 1.969, "5.0": 3.938}
"""GB/s of one PCIe lane in one direction, after its encoding, by PCIe version."""

CONTEXT_BYTES = 512 * MIB
"""Bytes of the card that CUDA and its modules take; assumed."""

LIBRARY_BYTES = 32 * MIB
"""Bytes of the workspaces of cuBLAS and other libraries; assumed, as on Hopper."""

DISPATCH_S = 5e-6
"""Seconds for starting one kernel; assumed."""

DISK_BYTES_PER_S = 1e9
"""Rate of a disk behind the host, each way; assumed."""

HALVES = ("float16", "bfloat16")
"""Types for which a card may have the rate `half_tflops`."""


@dataclass(frozen=True)
class Card:
    """Describes a card as its data sheet does.

    Attributes:
        name: for people.
        memory_gib: size of its memory, in GiB.
        bandwidth_gb_s: nominal bandwidth of its memory, in GB/s.
        fp32_tflops, half_tflops: peaks of dense matrix products; `half` on tensor cores with float32 accumulation.
        pcie: version and lanes, `4.0 x16`.
        sources: where the numbers are from.
        compared: pages that show the same numbers.
        unchecked: names of numbers that were found on no such page.
        usable: share of the memory that error correction leaves.
        halves: types that `half_tflops` is of; others run at the rate of float32.
        matmul, memory, link: shares of peak rate, bandwidth and PCIe that are reached.
        link_gb_s: measured in one direction, instead of a share; 0 where it was not.
        cpu_update_gb_s: read and written per second by updates on the CPU beside the card.
    """

    name: str
    memory_gib: float
    bandwidth_gb_s: float
    fp32_tflops: float
    half_tflops: float
    pcie: str
    sources: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    usable: float = 1.0
    halves: tuple[str, ...] = field(default=HALVES)
    matmul: float = 0.8
    memory: float = 0.8
    link: float = 0.6
    link_gb_s: float = 0.0
    cpu_update_gb_s: float = 7.7

    def __post_init__(self) -> None:
        """Raise ValueError for what no card is."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not (0 < value < math.inf or (item.name == "link_gb_s" and value == 0)):
                raise ValueError(f"{item.name} is {value!r}, which no card has")
        for share in ("usable", "matmul", "memory", "link"):
            if getattr(self, share) > 1:
                raise ValueError(f"{share} is {getattr(self, share)!r}, which is more than all")
        if _lanes(self.pcie) is None:
            raise ValueError(f"pcie is {self.pcie!r}, which is not like '4.0 x16'")
        if any(h not in HALVES for h in self.halves):
            raise ValueError(f"halves are {', '.join(self.halves)}, and may be {' and '.join(HALVES)}")

    @property
    def link_bytes_per_s(self) -> float:
        """Return the rate of copies to or from pinned memory, in one direction."""
        if self.link_gb_s:
            return self.link_gb_s * GB
        version, lanes = _lanes(self.pcie) or ("3.0", 1)
        return self.link * lanes * LANE_GB_S[version] * GB

    def described(self, dtype: str) -> DeviceDescription:
        """Describe the card as a device whose matrix products are of a type."""
        peak = self.half_tflops if dtype in self.halves else self.fp32_tflops
        text = json.dumps([dtype, *(str(getattr(self, f.name)) for f in fields(self))])
        slug = re.sub(r"\W+", "-", self.name, flags=re.ASCII).strip("-") or "card"
        traffic = self.memory * self.bandwidth_gb_s * GB
        return DeviceDescription(
            fingerprint=f"{slug[:80]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}",
            name=f"{self.name} (described)",
            type="cuda",
            memory_bytes=int(self.usable * self.memory_gib * (1 << 30)),
            flops_per_s=self.matmul * peak * 1e12,
            memory_copy_bytes_per_s=traffic,
            disk_read_bytes_per_s=DISK_BYTES_PER_S,
            disk_write_bytes_per_s=DISK_BYTES_PER_S,
            disk_duplex_bytes_per_s=DISK_BYTES_PER_S,
            update_bytes_per_s=traffic,
            dispatch_s=DISPATCH_S,
            offload_bytes_per_s=self.link_bytes_per_s,
            reload_bytes_per_s=self.link_bytes_per_s,
            duplex_bytes_per_s=2 * self.link_bytes_per_s,
            cpu_update_bytes_per_s=self.cpu_update_gb_s * GB,
            library_bytes=LIBRARY_BYTES,
            context_bytes=CONTEXT_BYTES,
        )

    def assumptions(self, dtype: str) -> list[str]:
        """List what an estimate for this card rests on, for people; a line each."""
        peak = self.half_tflops if dtype in self.halves else self.fp32_tflops
        link = f"{self.link_bytes_per_s / GB:.1f} GB/s each way"
        measured = "measured" if self.link_gb_s else f"{self.link:.0%} of PCIe {self.pcie}"
        return [
            f"{dtype} matrix products at {self.matmul:.0%} of {peak:g} TFLOPS; everything else at {self.memory:.0%} of "
            f"{self.bandwidth_gb_s:g} GB/s, {DISPATCH_S * 1e6:g} µs for each operation",
            f"{link} to pinned RAM ({measured}); {self.cpu_update_gb_s:g} GB/s of updates on the CPU",
            f"{CONTEXT_BYTES // MIB} MiB of the card for CUDA; operators as on the CPU (fused kernels of the card may "
            "take less); no workspace but the libraries'",
            *(f"source: {source}" for source in self.sources),
            *([f"the card's numbers were compared with: {'; '.join(self.compared)}"] if self.compared else []),
            *([f"compared with no page: {', '.join(self.unchecked)}"] if self.unchecked else []),
        ]


def _lanes(pcie: str) -> tuple[str, int] | None:
    found = re.fullmatch(r"(\d\.\d) x(\d{1,2})", pcie)
    return (found[1], int(found[2])) if found and found[1] in LANE_GB_S else None


@cache
def _tables() -> Mapping[str, Any]:
    text = resources.files("stowage.stages.device.cards").joinpath("cards.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def card_names() -> list[str]:
    """List the names of the known cards, as `--device` takes them."""
    return list(_tables()["cards"])


def card_named(name: str) -> Card:
    """Find a known card; capitals, blanks and underscores do not matter: `RTX 4090` is `rtx-4090`.

    Raises:
        ParameterError: there is none of that name.
    """
    tables = _tables()
    wanted = re.sub(r"[\s_-]+", "-", name.strip().lower()).removeprefix("nvidia-").removeprefix("geforce-")
    cards = tables["cards"]
    if wanted not in cards:
        close = difflib.get_close_matches(wanted, cards, n=1)
        near = f"did you mean {close[0]}? " if close else ""
        raise ParameterError(
            f"device {name!r} is not a known card: {near}there are {', '.join(cards)}; or give a JSON file of your own."
        )
    content = dict(cards[wanted])
    defaults = dict(tables["defaults"])
    named = dict.fromkeys([*content.pop("sources"), *defaults.pop("sources")])
    sources = [tables["sources"][key] for key in named]
    compared = [_page(tables["pages"], text) for text in content.pop("compared")]
    return record_of(Card, {**defaults, **content, "sources": sources, "compared": compared})


def _page(pages: Mapping[str, str], text: str) -> str:
    """Write a page's address for its name; a remark in brackets stays behind it."""
    name, blank, remark = text.partition(" ")
    return pages[name] + blank + remark


def read_card(path: Path) -> Card:
    """Read a card that someone described in JSON: the attributes of `Card` by name.

    Raises:
        ParameterError: the file cannot be read, or is not a card; the sentence says why.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return record_of(Card, content)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ParameterError(
            f"device {str(path)!r} does not describe a card ({reason}): it must be a JSON object with name, "
            "memory_gib, bandwidth_gb_s, fp32_tflops, half_tflops and pcie ('4.0 x16')."
        ) from error
