"""Trains one model on all cards of a machine: sharded under a plan, beside DistributedDataParallel and FSDP2.

- `whole.py`: all steps in order, repeating nothing that is finished.
- `training.py`: the step of one contestant, which starts its ranks, and the step that compares them.
- `contestant.py`: one rank of one contestant.
- `spread.py`: medians and quartiles over the rounds of a contestant.
- `page.py`: writes the results as one page.
- `rows.py`: measures two ranks of a CPU for the documents.
"""
