"""Measures how far plans are from what any schedule could do.

- `run`: measures the cells that are asked for, and keeps each as soon as it is done.
- `cells`: one model within one budget: ours and others' times over the bound.
- `planning`: planning with and without what is proven on top.
- `eviction`: plans with and without greedy eviction, on the same costs.
- `cases`: the models, traced and with costs.
- `others`: points that the rematerialization benchmark has measured of others.
- `pages`: describes the page.
"""
