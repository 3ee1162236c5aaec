"""Holds one shard of each parameter, and exchanges shards with the other ranks.

ranks        the group of processes: rates, objects from rank 0, sums
rates        what ranks have measured together, remembered for later runs
shares       what each rank gets of the host and of a disk while all use them
agreement    what ranks are about to do, compared before they exchange tensors
sharding     the shards of one model and its optimizer
iteration    the verbs of a generated step that gather and scatter
under_way    what a step has started and not yet waited for
contents     whole tensors for those who save and load
memory       the memory of tensors; buffers of collectives, freed in time
slices       the rows of whole tensors that one rank reads
writing      checkpoints through torch.distributed.checkpoint
watch        names an exchange that takes long
whole_model  a sharded model lent whole
weights      whole weights for a plain forward
plain_forward  keeps the plain forwards of ranks in step
failures     one sentence where ranks are lost, and nothing more afterwards
"""
