"""O-ILP and its rounding, which decide what is offloaded, and when (thesis 4).

- `problem`: blocks, parameter groups and the machine.
- `bounds`: a lower bound on the time of an iteration.
- `o_ilp`: the MILP over fractions of tensors.
- `rounding`: makes whole tensors of the fractions.
"""
