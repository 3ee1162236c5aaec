"""Which tests share a worker of pytest-xdist, and which come first."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

TOGETHER = {
    "tests/pipeline/test_end_to_end.py": "one planned project, one Prefect server",
    "tests/pipeline/test_fan_out.py": "one planned project, one Prefect server",
    "tests/pipeline/test_server.py": "one planned project, one Prefect server",
    "tests/pipeline/test_fresh_repository.py": "one planned project, one Prefect server",
    "tests/offload/test_offloaded_training.py": "models from the lower tier",
    "tests/offload/test_three_tiers.py": "models from the lower tier",
}
"""Files that are one group, for what they share; every other file is a group of its own."""

FIRST = (
    "tests/pipeline/",
    "tests/offload/",
    "tests/api/",
    "tests/documents/",
    "tests/benchmarks/",
    "tests/planning/",
    "tests/configurations/",
    "tests/train/",
    "tests/options/",
    "tests/formulations/",
    "tests/runtime/",
    "tests/solve/",
    "tests/profile/",
)
"""Where the longest groups are; what takes seconds fills the gaps at the end."""


def group_of(nodeid: str) -> str:
    """What a test belongs to."""
    file = nodeid.partition("::")[0]
    return TOGETHER.get(file, file)


def in_order(nodeid: str) -> int:
    """Smaller runs earlier; tests of one group that are equal here stay in the order in which they were found."""
    return next((number for number, folder in enumerate(FIRST) if nodeid.startswith(folder)), len(FIRST))


class Together(LoadScopeScheduling):
    """A group is one unit of work."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
