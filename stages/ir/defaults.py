"""Defaults of planning, each written once: settings, `fit` and the stages take them from here, `params.yaml` has them.

No value is repeated elsewhere: `tests/pipeline/test_defaults.py` compares the places.
"""

from __future__ import annotations

from typing import Final

METHOD: Final = "auto"
"""Name of the method that makes the plan, from `ir/methods.py`."""

SECONDS_PER_CALL: Final = 0.3
"""Seconds spent on measuring one distinct call."""

MIN_SAMPLES: Final = 6
"""Least number of executions of one distinct call."""

MAX_BLOCKS: Final = 300
"""Largest length of the chain."""

CLUSTER_SIZE: Final = 20
"""M^l: most members of a cluster inside a large block (thesis 3.3)."""

TOP_SIZE: Final = 30
"""M^t: most members of the largest cluster."""

ALPHA: Final = 0.5
"""Exponent of the number of nodes in the score of a cluster (thesis, equation 3.1)."""

MAX_EXACT_NODES: Final = 80
"""Most compute nodes of a block that is solved exactly; larger blocks are cut into clusters."""

PEAK_BUDGETS: Final = 6
"""Number of values of M_peak for which a block is solved (thesis 2.6.0.0.1)."""

SAVE_BUDGETS: Final = 6
"""Number of values of M_save for which a block is solved, for each value of M_peak."""

SOLVE_SECONDS: Final = 5.0
"""Time limit of one solve of a block, in seconds."""

FORMULATION: Final = "retention"
"""Formulation that solves a block for one pair of budgets."""

CLUSTER_FORMULATION: Final = "h_retention"
"""Formulation that solves a cluster with clusters inside, for one pair of budgets."""

CUT_SECONDS: Final = 5.0
"""Time to bound every schedule by cuts, and to find schedules by them, for one plan without a lower tier."""

MEMORY_SLOTS: Final = 500
"""Number of memory slots of RK-Rotor's table for the chain."""

LARGEST_BATCH: Final = 64
"""Most samples of a batch when the largest batch is searched for."""

O_ILP_SECONDS: Final = 20.0
"""Time limit of one solve of O-ILP, which decides what is offloaded, in seconds."""

O_ILP_GAP: Final = 0.01
"""Relative gap to the optimum at which an answer of O-ILP is good enough."""

O_ILP_SEARCHES: Final = 3
"""Number of searches with O-ILP for one plan: as it is, without updates on the CPU, and with the preprint's options."""

EVICTION_RULES: Final = 6
"""Rules of greedy eviction that a plan tries."""
