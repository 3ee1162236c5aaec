"""Measures how planning time grows.

- `growth.py`, `growth_figure.py`: with the number of layers, for GPT-2 and Llama.
- `depth.py`: with depth, for models that recompute.
- `big_model.py`: models that do not fit this machine.
- `partition_growth.py`, `partition_figure.py`: of H-Partition, with the size of the graph.
- `synthetic_graphs.py`: the graphs that H-Partition is timed on.
- `cluster_sizes.py`, `clusters_figure.py`: with the size of clusters.
"""
