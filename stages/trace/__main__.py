"""`python -m stowage.stages.trace` reads params.yaml and writes artifacts/trace."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from stowage.stages.freezing.choice import errors_of
from stowage.stages.inputs import TRACE, ExecutedFiles, imported_files, look_in_src, require_listed
from stowage.stages.inputs.origin import ORIGIN, write_origin
from stowage.stages.ir.command import ARTIFACTS, DEVICE, STORE, run_stage
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.lossy import ERRORS, GradientError
from stowage.stages.ir.table import read_record, write_rows
from stowage.stages.kernels import ReturnedStore, known_outputs
from stowage.stages.rewrite.lossy import allowed
from stowage.stages.sensitivity import StepTensors, gradient_errors
from stowage.stages.settings import load_settings
from stowage.stages.trace import MicroBatch, record_step, with_updates
from stowage.stages.workload.configured import configured_optimizer, configured_workload, more_batches
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
    lossy = parameters.lossy.leave
    workload = configured_workload(settings, fake=source.callable is None and lossy is None)
    batches = more_batches(settings, workload, parameters.lossy.batches) if lossy is not None else [workload.batch]
    if settings.device != "cpu":
        move(workload.model, settings.device)
        for batch in batches:
            batch.update({k: v.to(settings.device) for k, v in batch.items() if isinstance(v, torch.Tensor)})
    make = configured_optimizer(settings)
    optimizer = make(list(workload.model.parameters())) if make else None
    loss = resolve(settings.loss, "trace.loss") if settings.loss else None
    recorded = record_step(workload.model, workload.batch, loss=loss, freezes=parameters.solve.freeze is not None)
    trace = with_updates(
        recorded,
        workload.model,
        optimizer=optimizer,
        micro_batch=MicroBatch(ranks=settings.ranks),
        label=source.architecture or source.directory or source.callable or "",
    )
    for notice in recorded.notices:
        print(notice, file=sys.stderr)
    files = imported_files(root, executed.paths)
    require_listed(root, parameters, TRACE, files)
    folder = ARTIFACTS / "trace"
    locations = [call.location for call in trace.calls]
    # Without locations: a line inserted into a source file must not change the trace.
    replace(trace, calls=[replace(call, location="") for call in trace.calls]).save(folder)
    table = folder / ERRORS
    table.unlink(missing_ok=True)
    if lossy is not None:
        live = [StepTensors.of(workload.model, batch, recorded.outside) for batch in batches]
        # Ranks measure nothing: it is the gradient of whole parameters on one rank's batches.
        whole = trace if settings.ranks == 1 else with_updates(recorded, workload.model)
        errors = gradient_errors(whole, allowed(lossy.kinds, freezes=True), live)
        freeze = parameters.solve.freeze
        write_rows(table, GradientError, errors_of(errors, trace, freeze.choice()) if freeze is not None else errors)
    write_origin(ORIGIN, root, parameters, files, trace.meta.configuration_hash, locations)
    print(f"trace: {len(trace.calls)} calls, {len({c.signature for c in trace.calls})} of them distinct")


if __name__ == "__main__":
    run_stage(main)
