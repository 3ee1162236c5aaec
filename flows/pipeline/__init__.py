"""Runs the stages with DVC, Git and Prefect.

- `chain.py`: the chain of stages as Prefect tasks.
- `fan_out.py`, `task_runner.py`: solve distinct blocks as mapped tasks, and choose where these run.
- `dvc.py`, `git.py`: call DVC and Git.
- `inputs.py`: keeps the inputs of stages in `dvc.yaml` up to date.
- `project.py`: finds the project, and the environment of its stages.
- `workspace.py`, `overrides.py`: a worktree in which a run with other parameters does not touch the checkout.
- `results.py`: collects what a run found.
- `command.py`: options and errors that commands share.
- `extras.py`, `prefect_imports.py`: packages that only some commands need.
"""
