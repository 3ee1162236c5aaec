"""Measures what the documents claim; `stowage.flows.benchmark` is the command.

- `main_job/`: the job of `params.yaml` beside plain PyTorch.
- `limits/`: training under a memory limit of the kernel.
- `papers/`: the papers' tables, planned here.
- `elixir/`: the Elixir paper's tables of several GPUs, simulated.
- `slimfit/`: the SlimFit paper's policies on tasks that are on every machine, and what may be kept in codes.
- `remat/`: rematerialization beside what others do.
- `proven/`: how far plans are from what any schedule could do.
- `scaling/`: how planning time grows with the model.
- `slimfit/`: what freezing saves.
- `gpu/`: measures, plans and races on a machine with a GPU.
- `pages/`: writes the pages in `docs/measured` from data.
- `results.py`: where results are written.
- `child_process.py`: a child process that answers JSON lines, in which contestants live.
- `markdown.py`: writes tables as Markdown.
"""
