"""Runs a Hugging Face Trainer within a memory budget: `stow`.

- `trainer.py`: `stow`, and what takes the place of the Trainer's training step.
- `ranks.py`: takes the place of DistributedDataParallel on several ranks.
- `resuming.py`: brings optimizer states that the Trainer has loaded to several ranks.
- `refusals.py`: refuses Trainers whose step cannot be planned.
- `batches.py`: finds the first batches of the Trainer's evaluations.
- `answers.py`: answers the Trainer's calls after a planned step.
- `freezing.py`: keeps in checkpoints what chooses the units that train.
- `files.py`: saves and loads the Trainer's files tensor by tensor.
"""
