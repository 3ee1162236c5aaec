"""The choice of an option for each block of the chain.

- `rk_rotor`: RK-Rotor, dynamic programming over memory slots.
- `policies`: fixed policies as sequences of steps.
"""
