"""Defaults of planning, each written once; settings, `fit` and the stages take them from here, `params.yaml` has them.

No value is repeated elsewhere: `tests/pipeline/test_defaults.py` compares the places.
"""

from __future__ import annotations

from typing import Final

METHOD: Final = "auto"
"""How plans are made; see `ir/methods.py`."""

SECONDS_PER_CALL: Final = 0.3
"""Time spent on measuring one distinct call."""

MIN_SAMPLES: Final = 6
"""Executions of one distinct call, at least."""

MAX_BLOCKS: Final = 300
"""Length of the chain, at most."""

CLUSTER_SIZE: Final = 20
"""M^l, members of a cluster inside a large block, at most (thesis 3.3)."""

TOP_SIZE: Final = 30
"""M^t, members of the largest cluster, at most."""

ALPHA: Final = 0.5
"""Exponent of the number of nodes in the score of a cluster (thesis, equation 3.1)."""

MAX_EXACT_NODES: Final = 80
"""Compute nodes of a block up to which it is solved exactly. Larger ones are large: they are cut into clusters."""

PEAK_BUDGETS: Final = 6
"""Values of M_peak for which a block is solved (thesis 2.6.0.0.1)."""

SAVE_BUDGETS: Final = 6
"""Values of M_save for which a block is solved, for each of M_peak."""

SOLVE_SECONDS: Final = 5.0
"""Limit of one solve of a block."""

FORMULATION: Final = "retention"
"""Which formulation solves a block for one pair of budgets."""

CLUSTER_FORMULATION: Final = "h_retention"
"""Which formulation solves a cluster that has clusters inside, for one pair of budgets."""

MEMORY_SLOTS: Final = 500
"""Memory slots of RK-Rotor's table for the chain."""

LARGEST_BATCH: Final = 64
"""Samples of the largest batch that is looked at."""

O_ILP_SECONDS: Final = 20.0
"""Limit of one solve of O-ILP, which decides what is offloaded."""

O_ILP_GAP: Final = 0.01
"""Relative gap to the optimum at which an answer of O-ILP is good enough."""
