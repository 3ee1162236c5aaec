"""Measures a machine with a GPU, plans for it, and races contestants on it.

- `job.py`: the training configuration, and how every contestant builds model, optimizer and batches from it.
- `measure.py`: the first step, on the GPU's machine: rates, trace and costs.
- `plan.py`: the second step, on a machine that plans.
- `race.py`: the third step: every contestant in turn.
- `whole_race.py`: all three steps, repeating nothing that is finished.
- `table.py`: the race's table.
- `carried.py`: the files carried between the two machines.
- `contestant.py`: the process of one contestant.
- `peers.py`: contestants that are not Stowage.
- `planned.py`: the contestant that trains under a carried plan.
- `by_rules.py`: trains a job under plans by rules.
- `lanes.py`: delayed copies and computing, which make a missing wait visible.
- `pinned.py`: counts the time that pinning host memory takes.
- `clocks.py`: reads the card's clocks.
- `step.py`, `steps.py`, `process.py`: run pieces of work, each in a process of its own.
- `ranks/`: trains on all cards at once, sharded under a plan, beside DistributedDataParallel and FSDP2.
- `first/`: checks of the first ten minutes on a card.
"""
