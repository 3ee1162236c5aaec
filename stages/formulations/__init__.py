"""The formulations: programs for solvers, dynamic programs and rules that find schedules and decide offloading.

- `block`: schedules of one block.
- `chain`: chooses an option for each block of the chain.
- `cluster`: schedules of an H-Graph, for large blocks.
- `cuts`: bounds every schedule of a whole step, and finds schedules that reach the bound.
- `eviction`: schedules of the whole step by greedy eviction.
- `freezing`: finds which units need most memory when they train together.
- `offload`: decides what is offloaded, and when.
- `sharding`: decides where shards of parameters live, and which gathered weights are kept.
"""
