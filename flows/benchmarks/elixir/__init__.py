"""Simulates the tables of the Elixir paper, and puts the published numbers beside them.

- `published`: Tables 7 and 8 as data.
- `machines`: Tables 4 and 5 as rates.
- `models`: GPT-2 models as tables of groups (Table 6).
- `engines`: simulates one configuration under each engine.
- `constants`: the few constants of each machine, and how they are fitted.
- `rows`: simulated beside published.
- `plan_b`: plans a sharded step as a whole; `sharded_step` traces the model, `sharded_machine` describes one rank,
  `rank_time` adds what collectives cost computing.
- `group_plans`: judges choices for groups as such plans.
- `plan_cells`: makes both for each cell of the tables, and keeps them.
- `scaling`: time and memory from 1 to 64 GPUs.
- `judgement`: who fits, how many are within 20%, and the speed-ups.
- `plan_time`: how long planning takes.
- `traced`: OPT-175B from its trace.
- `figure`: plots that.
- `pages`: the tables of the page.
- `step_time`: how long planning a sharded step takes.
- `kept`: keeps results of a long run.
- `run`, `run_plans`: the commands.
"""
