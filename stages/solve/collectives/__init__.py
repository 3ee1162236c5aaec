"""Plans collectives: gathers of weights and scatters of gradients, beside computing.

overlap      starts gathers early and ends scatters late, as far as the budget has room
policies     the fixed policies of sharded training, which every plan must beat
groupings    the ways to put parameters into groups: by block, and by layer with a root
groups       choices for groups of parameters, as Elixir and FSDP2 make them, lowered to plans
group_table  groups of a program, with sizes and times, from which such choices are made
group_race   what ZeRO, Elixir and the exact choice of four states make of them, as baselines
"""
