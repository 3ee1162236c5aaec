"""Carries out a sharding plan with PyTorch's own `fully_shard`; the modules that come out are plain modules.

- `apply.py`: shards each group of modules in the state that the plan chose for it.
- `optimizer.py`: gives an optimizer the shards in place of the whole parameters.
- `collectives.py`: collectives that say what they exchange where a rank is lost.
- `gloo.py`: the same on gloo, freeing their memory in time.
- `naming.py`: hands them to the groups.
- `ranks.py`: what ranks tell each other before they shard.
- `buffers.py`: the first rank's buffers for all, as DDP has them.
- `trial.py`: whether an optimizer can step such shards.
- `trainers.py`: tells libraries that wrap models that this one is sharded already.
- `untouched.py`: leaves a model and an optimizer as they were if anything fails.
"""
