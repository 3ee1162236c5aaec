"""Small sharding problems to test with: Hypothesis strategies, and every choice that there is."""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup

RATES = st.sampled_from([1e6, 2e6, 4e6, 8e6, 16e6])
MILLISECONDS = st.integers(1, 9)
BYTES = st.integers(0, 9000)


@st.composite
def groups(draw: st.DrawFn, most: int = 4, largest: int = 9000) -> tuple[ParameterGroup, ...]:
    """Up to `most` groups, some of them frozen in part or whole, the first perhaps the root."""
    count = draw(st.integers(1, most))
    late = draw(st.permutations(range(1, count + 1)))
    with_root, in_pairs = draw(st.booleans()), draw(st.booleans())
    found = []
    for i in range(count):
        saved = draw(BYTES)
        elements = draw(st.integers(1, min(largest, 9000)) | st.integers(largest // 2, largest))
        trainable = draw(st.sampled_from([elements, elements // 2, 0]))
        root = with_root and i == 0
        is_late = not root and draw(st.booleans())
        found.append(
            ParameterGroup(
                group=i,
                modules=("" if root else f"layer.{i}",),
                parameters=(),
                elements=elements,
                trainable=trainable,
                stored_bytes=draw(st.sampled_from([2, 4])),
                compute_bytes=2,
                state_bytes=8,
                forward_s=1e-3 * draw(MILLISECONDS),
                backward_s=2e-3 * draw(MILLISECONDS),
                saved_bytes=saved,
                forward_peak_bytes=draw(BYTES),
                backward_peak_bytes=draw(BYTES),
                segment=i // 2 if in_pairs else -1,
                backward_with_gradients_bytes=draw(BYTES),
                first_saved_bytes=draw(st.integers(0, saved)) if root else 0,
                entering_bytes=0 if root else draw(BYTES),
                incoming_bytes=0 if root else draw(BYTES) - saved,
                leaving_bytes=0 if root else draw(BYTES),
                end_peak_bytes=draw(BYTES) if root else 0,
                last_trainable=draw(st.integers(0, trainable)),
                after_root=late[i] if is_late else 0,
                idle_in_backward=is_late and draw(st.booleans()),
                reduce_bytes=draw(st.sampled_from([0, 2, 4])),
                casts_gradients=draw(st.booleans()),
                largest_cast=draw(st.sampled_from([0, elements // 3])),
                update_bytes=draw(st.sampled_from([0, 90_000])),
            )
        )
    return tuple(found)


@st.composite
def machines(draw: st.DrawFn) -> ParallelMachine:
    """A machine of one, two or four ranks."""
    return ParallelMachine(
        name="small",
        ranks=draw(st.sampled_from([1, 2, 4])),
        device_bytes=10**6,
        host_bytes=10**6,
        collective_bytes_per_s=draw(RATES),
        collective_latency_s=1e-4,
        reload_bytes_per_s=draw(RATES),
        offload_bytes_per_s=draw(RATES),
        duplex_bytes_per_s=draw(RATES),
        device_updates_per_s=draw(RATES),
        host_updates_per_s=draw(RATES) / 4,
        collectives_share_link=draw(st.booleans()),
        collective_slowdown=draw(st.sampled_from([0.0, 0.5])),
    )


@st.composite
def problems(draw: st.DrawFn, most: int = 4, largest: int = 9000) -> ShardingProblem:
    """A problem with more memory than it can need."""
    return ShardingProblem(
        groups=draw(groups(most, largest)),
        machine=draw(machines()),
        device_budget=10**12,
        host_budget=10**12,
        micro_batches=draw(st.sampled_from([1, 3])),
        ahead=draw(st.integers(0, 2)),
        fixed_bytes=draw(BYTES),
        copies=draw(st.booleans()),
        host_is_device=draw(st.booleans()),
    )


def every_choice(problem: ShardingProblem) -> list[tuple[GroupChoice, ...]]:
    """All choices, each once."""
    states = product(product((False, True), repeat=2), repeat=len(problem.groups))
    found = {
        problem.choices({i for i, s in enumerate(some) if s[0]}, {i for i, s in enumerate(some) if s[1]})
        for some in states
    }
    return sorted(found, key=repr)
