"""Keeps tensors in the lower tier while a plan runs, and transfers them.

- `offloading`: everything that others ask, as one object, built up from the four files that follow.
- `ledger`: which tensor is where.
- `transfers`: starts copies and waits for them.
- `updating`: updates by the CPU.
- `placing`: puts tensors where a plan wants them between iterations.
- `layout`: shape and strides of a tensor while it is offloaded.
- `cpu_updates`: the optimizer on one parameter, in a thread.
- `absence`, `offloaded_tensor`, `state_dicts`: refuse to read what is offloaded, with an error that says so.
- `stand_ins`: tensors without content, in the memory of one number each.
- `lender`: who lends weights to a plain forward.
- `contents`: tensors wherever they are, for those who save and load.
"""
