"""Where tensors may live that do not fit the device: one value instead of three arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stowage.flows.api.arguments import check_arguments
from stowage.stages.ir.errors import ParameterError

SHOWN = {"offload_dir": "offload.dir", "host_budget": "offload.host", "disk_budget": "offload.disk"}


@dataclass(frozen=True)
class Offload:
    """The places below the device that a plan may use.

    Attributes:
        dir: a folder on a fast disk. On a machine without a GPU what does not fit the device budget lives there; on one
            with a GPU what does not fit `host` either.
        host: pinned host memory that a model on a GPU may use, such as `8GiB`.
        disk: bytes that may be taken in `dir`; by default what is free there.
    """

    dir: str | Path | None = None
    host: str | int | None = None
    disk: str | int | None = None

    names: ClassVar[Mapping[str, str]] = SHOWN
    """What errors call the attributes, by the names that `params.yaml` has for them."""

    def __post_init__(self) -> None:
        """Look at the attributes.

        Raises:
            ParameterError: one is of another kind than it must be.
        """
        given = {"offload_dir": self.dir, "host_budget": self.host, "disk_budget": self.disk}
        check_arguments(self.names, **given)

    @property
    def anywhere(self) -> bool:
        """Whether there is any such place."""
        return self.dir is not None or self.host is not None


class LooseOffload(Offload):
    """The same of the three arguments `offload_dir`, `host_budget` and `disk_budget`, which errors name."""

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
