"""What stands for tensors that are elsewhere takes the memory of one number, and none while they are here."""

from __future__ import annotations

import torch

from stowage.stages.device.events import measure_allocations
from stowage.stages.runtime.offload.stand_ins import StandIns


def test_one_number_for_each_type_and_its_release_is_seen() -> None:
    made, cpu = StandIns(), torch.device("cpu")
    found = [made.of(torch.empty(shape, device="meta"), cpu) for shape in ((3, 4), (5,), ())]
    half = made.of(torch.empty(2, dtype=torch.bfloat16, device="meta"), cpu)
    assert [t.shape for t in found] == [(3, 4), (5,), ()]
    assert all(t.isnan().all() for t in (*found, half))
    assert len({t.untyped_storage().data_ptr() for t in found}) == 1
    released = measure_allocations(made.release, [*found, half]).events
    assert sorted(e.nbytes for e in released) == [-4, -2]
    again = made.of(torch.empty(7, device="meta"), cpu)
    assert again.untyped_storage().data_ptr() != found[0].untyped_storage().data_ptr()
