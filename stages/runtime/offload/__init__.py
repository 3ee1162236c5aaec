"""The tier below the device at run time.

- `offloading`: everything that others ask, as one object; made of `ledger` (what is where), `transfers` (copies),
  `updating` (updates by the CPU) and `placing` (where a plan wants things between iterations).
- `layout`: a tensor while it is below; `cpu_updates`: the optimizer on one parameter, in a thread.
- `absence`, `away`, `state_dicts`: who reads what is below is told so.
- `contents`: tensors wherever they are, for those who save and load.
"""
