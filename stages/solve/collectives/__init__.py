"""Plans collectives: gathers of weights and scatters of gradients, beside computing.

overlap      starts gathers early and ends scatters late, as far as the budget has room
policies     the fixed policies of sharded training, which every plan must beat
groups       choices for groups of parameters, as Elixir and FSDP2 make them, lowered to plans
"""
