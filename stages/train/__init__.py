"""Trains under the plan, and plain PyTorch beside it.

- `setup`: makes what is trained.
- `loop`: the training loops.
- `frozen`: freezes parts of the model in the steps of a training.
- `comparison`: compares losses and times.
- `plan_files`: reads the plan.
- `rank`: one of several processes that train together.
- `launch`: starts them.
- `checkpoint`, `restore`: write a training state, and continue from one.
- `packing`: nested containers with tensors as JSON.
- `identity`: finds the checkpoint of a run.
- `results`: writes what training leaves.
"""
