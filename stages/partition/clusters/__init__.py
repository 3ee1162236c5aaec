"""H-Partition, the recursive partition of a large block into clusters (thesis 3.2.1).

- `apart`: moves nodes that depend on no input to their first reader.
- `block`: partitions the forward parts of blocks.
- `candidates`: finds nodes that may form a group.
- `describe`: makes the rows of a hierarchy from groups.
- `flow`: makes a graph to partition from a traced step.
- `level`: one level of the partition.
- `merge`: merges the best candidates of a level.
- `partition`: the whole algorithm.
"""
