"""Holds the search engine of the Elixir paper (its section 5 and appendix A).

- `allowed`: the memory that it may use, and the least rCache for checkpointed segments (A.1, A.3).
- `chunks`: packs parameters into chunks (A.2).
- `rcache`: counts what the rCache has to load, with Belady's replacements (A.2).
- `benefit`: what a block of the rCache and a chunk on the device save: I(n) and J(n) (5.1).
- `search`: chooses length, blocks and chunks on the device.
- `on_fsdp2`: the same greedy choice over FSDP2's groups, with what FSDP2 transfers.
"""
