"""Defines `Offload`: one value for where tensors may be offloaded to, instead of three arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stowage.flows.api.arguments import check_arguments
from stowage.stages.ir.errors import ParameterError

SHOWN = {"offload_dir": "offload.dir", "host_budget": "offload.host", "disk_budget": "offload.disk"}
"""Argument -> the attribute of `Offload` that replaces it, for errors."""


@dataclass(frozen=True)
class Offload:
    """The places that a plan may offload tensors to.

    Attributes:
        dir: a folder on a fast disk. On a machine without a GPU what does not fit the device budget lives there; on one
            with a GPU what does not fit `host` either.
        host: pinned host memory that a model on a GPU may use, such as `8GiB`.
        disk: bytes that may be taken in `dir`; by default what is free there.
        names: name in `params.yaml` -> name of the attribute that errors use.
    """

    dir: str | Path | None = None
    host: str | int | None = None
    disk: str | int | None = None

    names: ClassVar[Mapping[str, str]] = SHOWN
    """Maps the names in `params.yaml` to the names of attributes that errors use."""

    def __post_init__(self) -> None:
        """Check the attributes.

        Raises:
            ParameterError: one is of another kind than it must be.
        """
        given = {"offload_dir": self.dir, "host_budget": self.host, "disk_budget": self.disk}
        check_arguments(self.names, **given)

    @property
    def anywhere(self) -> bool:
        """Return whether tensors may be offloaded anywhere."""
        return self.dir is not None or self.host is not None


class LooseOffload(Offload):
    """An `Offload` made of the arguments `offload_dir`, `host_budget` and `disk_budget`, which its errors name."""

    names: ClassVar[Mapping[str, str]] = {}


def offload_of(
    offload: Offload | None,
    offload_dir: str | Path | None = None,
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
) -> Offload:
    """Make one value of `offload` or of the three arguments that it replaces.

    Raises:
        ParameterError: both are given, or one is of another kind than it must be.
    """
    if offload is None:
        return LooseOffload(offload_dir, host_budget, disk_budget)
    if not isinstance(offload, Offload):
        raise ParameterError(
            f"offload is a {type(offload).__name__}: give Offload(dir, host=…, disk=…), or None to offload nothing."
        )
    loose = {"offload_dir": offload_dir, "host_budget": host_budget, "disk_budget": disk_budget}
    given = [name for name, value in loose.items() if value is not None]
    if given:
        raise ParameterError(f"Both offload and {given[0]} say where tensors may live: give {SHOWN[given[0]]} alone.")
    return offload
