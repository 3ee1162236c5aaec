"""Reads and checks `params.yaml`; every mistake in it is one sentence that names the key and says what to do.

- `load`: reads a file, and turns mistakes into sentences.
- `models`: what the file may say, with defaults.
- `sizes`: sizes and shares as text.
- `budgets`: kinds of device budgets.
"""

from stowage.stages.settings.load import load_settings, parse_settings
from stowage.stages.settings.models import (
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    OptionsSettings,
    PartitionSettings,
    ProfileSettings,
    ScheduleSettings,
    Settings,
    SolveSettings,
    TraceSettings,
    TrainSettings,
)
from stowage.stages.settings.sizes import parse_bytes, resolve_budget

__all__ = [
    "DataSettings",
    "ModelSettings",
    "OptimizerSettings",
    "OptionsSettings",
    "PartitionSettings",
    "ProfileSettings",
    "ScheduleSettings",
    "Settings",
    "SolveSettings",
    "TraceSettings",
    "TrainSettings",
    "load_settings",
    "parse_bytes",
    "parse_settings",
    "resolve_budget",
]
