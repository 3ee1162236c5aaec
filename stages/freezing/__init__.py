"""Freezes parts of a model, step by step, within one plan that serves every choice of what trains.

What trains:
- `units`: groups parameters into units; `descent` finds which gradients descend from each call.
- `policies`: choose which units train in a step.
- `dynamics`: keeps how much each unit moved.
- `schedule`: follows a training, step by step.
- `choice`: reads what a run of the pipeline freezes.

What a plan does under a mask:
- `guards`: says which rows run, and where tensors die; `owners` and `stretches` know gradients and transfers.
- `outputs`: finds results of kernels that are left out.
- `kernels`: finds for which units operators train whose kernels PyTorch chooses by that.
- `workspaces`: finds what rows need besides what they read and make, by the flags of their kernels.
- `projection`: makes the plan that runs under a mask, for the referee.
- `levels`: writes what each row takes, as a function of the mask.
- `times`: predicts the mean time of a step.
- `copies`: counts the copies that measuring moves takes.
- `errors`: bounds what codes do to the gradient, whatever trains.
- `stored`: judges plans that come from a file.
"""
