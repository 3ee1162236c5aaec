"""What stands for tensors that are elsewhere takes the memory of one number each, and none while they are here."""

from __future__ import annotations

import torch

from stowage.stages.device.events import measure_allocations
from stowage.stages.runtime.offload.stand_ins import StandIns


def test_one_number_for_each_name_and_its_release_is_seen() -> None:
    made, cpu = StandIns(), torch.device("cpu")
    shapes = {"weight": (3, 4), "bias": (5,), "scale": ()}
    found = {name: made.of(name, torch.empty(shape, device="meta"), cpu) for name, shape in shapes.items()}
    found["half"] = made.of("half", torch.empty(2, dtype=torch.bfloat16, device="meta"), cpu)
    assert {name: tuple(t.shape) for name, t in found.items()} == {**shapes, "half": (2,)}
    assert all(t.isnan().all() for t in found.values())
    assert [t.untyped_storage().nbytes() for t in found.values()] == [4, 4, 4, 2]
    assert len({t.untyped_storage().data_ptr() for t in found.values()}) == len(found)
    same = made.of("weight", torch.empty(3, 4, device="meta"), cpu)
    assert same.untyped_storage().data_ptr() == found["weight"].untyped_storage().data_ptr()
    released = measure_allocations(made.release, [*found.values()]).events
    assert sorted(e.nbytes for e in released) == [-4, -4, -4, -2]
    again = made.of("weight", torch.empty(7, device="meta"), cpu)
    assert again.untyped_storage().data_ptr() != found["weight"].untyped_storage().data_ptr()
