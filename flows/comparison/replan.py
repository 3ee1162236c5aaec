"""Plans again where that is honest: for a device that is not here only from what was traced there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stowage.flows.pipeline.dvc import StageFailedError, changed_stages, dvc_output, reproduce
from stowage.flows.pipeline.project import PLAN_STAGES
from stowage.stages.ir.code_record import renew_code
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.table import read_record, read_rows


class NeedsDeviceError(StowageError):
    """Says that the plan needs a trace or costs that can be made only on a device that this machine is not."""


def machine_kinds() -> set[str]:
    """Return the types of devices that this machine has."""
    import torch

    return {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}


def replan(root: Path, log: Callable[[str], None], here: set[str] | None = None) -> None:
    """Bring the plan up to date.

    On the target's kind of machine every stage may run. Elsewhere a model that has not changed is solved again from
    its stored trace and costs, and one that has is not planned at all.

    Raises:
        NeedsDeviceError: the plan needs a trace or costs from a device that is not here.
        StowageError: a stage failed, or a stored trace cannot be had.
    """
    for sentence in renew_code(root):
        log(sentence)
    target = read_record(root / "artifacts" / "device.json", DeviceDescription)
    kinds = machine_kinds() if here is None else here
    if target.type in kinds:
        stages: tuple[str, ...] = PLAN_STAGES
    else:
        _require_stored_trace(root, target)
        stages = PLAN_STAGES[PLAN_STAGES.index("partition") :]
    _remember_costs(root, target)
    for stage in stages:
        try:
            reproduce(root, stage, log)
        except StageFailedError as error:
            if stage == "profile" and not _is_this_machine(target):
                raise NeedsDeviceError(
                    f"The plan needs costs measured on {target.name}, which this machine is not: {error}"
                ) from error
            raise


def _remember_costs(root: Path, target: DeviceDescription) -> None:
    """Put the costs that came with the repository into the store, where the next profile finds them."""
    from stowage.stages.profile.store import CostStore

    exported = root / "artifacts" / "profile" / "costs.parquet"
    if exported.is_file():
        CostStore(root / ".stowage" / "costs").add(target.fingerprint, read_rows(exported, Cost))


def _is_this_machine(target: DeviceDescription) -> bool:
    from stowage.stages.device import device_of

    return device_of(target.type).fingerprint() == target.fingerprint


def _require_stored_trace(root: Path, target: DeviceDescription) -> None:
    if _inputs_changed(changed_stages(root, ["trace"]).get("trace", [])):
        raise NeedsDeviceError(
            f"The model changed and needs a trace on the device ({target.name}, {target.type}), which this machine is "
            "not: run `dvc repro` there and commit dvc.lock."
        )
    try:
        dvc_output(root, "checkout", "--quiet", "artifacts/trace", "artifacts/profile/costs.parquet")
    except StowageError as error:
        raise StowageError(f"The stored trace and costs are not at hand: run `dvc pull` first ({error})") from error


def _inputs_changed(reasons: list[Any]) -> bool:
    """Return whether DVC names a reason other than outputs that are merely absent."""
    return any(not isinstance(reason, dict) or "changed deps" in reason for reason in reasons)
