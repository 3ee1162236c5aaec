"""Functions and classes that scripts import: `fit`, `best_batch`, `curve`, `shard`, `stow` and `TrainingStep`.

- `public.py`: public names, and where each is defined.
- `fit.py`: plans the training step of a model.
- `best_batch.py`: finds the batch size with the least time per sample.
- `curve.py`: plans one step within many budgets.
- `shard.py`, `sharding/`: shard a model over ranks with PyTorch's own engine.
- `several_ranks.py`, `buckets.py`: check and prepare steps that ranks train together.
- `training_step.py`: the training step that `fit` returns.
- `arguments.py`, `choices.py`, `offload.py`: check and group the arguments of these functions.
- `freeze.py`, `frozen_steps.py`: say what is frozen in each step, and freeze it.
- `budget.py`: turns a budget as people write it into bytes.
- `lower_tier.py`, `update_rate.py`: describe the lower tier, and how fast the CPU updates parameters in it.
- `late_weights.py`: loads the weights of a model that was built on the meta device.
- `planner.py`: plans training steps and evaluations of one model.
- `programs.py`, `steps.py`, `recent.py`: find or make the program for a batch, and keep the latest ones.
- `measured_batches.py`: chooses the batches on which is measured what codes do to the gradient.
- `micro_batches.py`: tells what micro-batch of an update a call is.
- `binding.py`: makes executable programs of plans.
- `recording.py`: traces steps that are new or have changed.
- `evaluation.py`: evaluates a model under forward-only plans.
- `storing.py`, `saving.py`: save and load checkpoints, weights and optimizer states.
- `history.py`, `step_report.py`: remember iterations, and report them as an HTML page.
- `step_loss.py`: the loss that a training step returns.
- `reasons.py`: says in words why a step is planned.
- `interrupt.py`, `whole_steps.py`: handle Ctrl-C during planning and during a step.
- `check/`: compares planned steps with plain PyTorch.
- `live/`: follows numbers that a step reads and that change from call to call.
- `trainer/`: runs a Hugging Face Trainer within a memory budget.
"""
