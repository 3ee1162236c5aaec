"""The stage that folds calls into compute nodes, cuts the chain of blocks, and finds identical blocks.

- `alike`: finds in a rewrite where the step as it was recorded is cut.
- `blocks`: assigns nodes to blocks and describes each block.
- `chain`: finds the borders between blocks.
- `chains`: makes the chains of a step.
- `clusters`: partitions large blocks into clusters.
- `fold`: folds calls into compute nodes.
- `forward`: compute nodes of a forward alone.
- `group_lives`: from when to when storages are in memory, and whose group they are.
- `group_members`: decides which group of parameters each call belongs to.
- `group_parts`: what each group takes of a step's time and memory.
- `group_reductions`: when FSDP2 reduces each group's gradients.
- `parameter_groups`: parameters that are gathered together, and their part of the step.
- `scale`: a partitioned step in another size.
"""

from stowage.stages.partition.chains import Partitioned, make_blocks, make_chains, make_variants
from stowage.stages.partition.clusters.partition import Limits

__all__ = ["Limits", "Partitioned", "make_blocks", "make_chains", "make_variants"]
