"""`python -m stowage.stages.trace` reads params.yaml and writes artifacts/trace."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from stowage.stages.inputs import TRACE, ExecutedFiles, imported_files, look_in_src, require_listed
from stowage.stages.inputs.origin import ORIGIN, write_origin
from stowage.stages.ir.command import ARTIFACTS, DEVICE, STORE, run_stage
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.table import read_record
from stowage.stages.kernels import ReturnedStore, known_outputs
from stowage.stages.settings import load_settings
from stowage.stages.trace import MicroBatch, trace_step
from stowage.stages.workload.configured import configured_optimizer, configured_workload
from stowage.stages.workload.models import move, resolve


def main() -> None:
    """Trace the step that params.yaml describes, without weights in memory where the model allows it."""
    parameters, root = load_settings(), Path()
    settings = parameters.trace
    target = read_record(DEVICE, DeviceDescription)
    if settings.device != target.type:
        raise ParameterError(
            f"trace.device is {settings.device}, but {DEVICE} describes a {target.type} device: make them agree "
            "(`python -m stowage.stages.device` makes this machine the target)."
        )
    known_outputs().learn(ReturnedStore(STORE / "costs").read(target.fingerprint))
    executed = ExecutedFiles()
    look_in_src(root)
    source = settings.model
    workload = configured_workload(settings, fake=source.callable is None)
    if settings.device != "cpu":
        move(workload.model, settings.device)
        workload.batch.update(
            {k: v.to(settings.device) for k, v in workload.batch.items() if isinstance(v, torch.Tensor)}
        )
    make = configured_optimizer(settings)
    optimizer = make(list(workload.model.parameters())) if make else None
    notices: list[str] = []
    trace = trace_step(
        workload.model,
        workload.batch,
        loss=resolve(settings.loss, "trace.loss") if settings.loss else None,
        optimizer=optimizer,
        micro_batch=MicroBatch(ranks=settings.ranks),
        label=source.architecture or source.directory or source.callable or "",
        notices=notices,
    )
    for notice in notices:
        print(notice, file=sys.stderr)
    files = imported_files(root, executed.paths)
    require_listed(root, parameters, TRACE, files)
    folder = ARTIFACTS / "trace"
    locations = [call.location for call in trace.calls]
    # Without locations: a line inserted into a source file must not change the trace.
    replace(trace, calls=[replace(call, location="") for call in trace.calls]).save(folder)
    write_origin(ORIGIN, root, parameters, files, trace.meta.configuration_hash, locations)
    print(f"trace: {len(trace.calls)} calls, {len({c.signature for c in trace.calls})} of them distinct")


if __name__ == "__main__":
    run_stage(main)
