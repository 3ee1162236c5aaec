"""Records a program on tensors without memory.

- `record.py`: every ATen call, as an `fx.Graph`.
- `fake.py`: fake kernels that return what real ones do.
- `smaller.py`: smaller tensors with the same pattern of strides, to try real kernels on.
- `marking.py`: which module is running.
- `readings.py`: numbers that the user's code reads off tensors.
- `values.py`: functions that read a tensor's memory without a call that PyTorch dispatches.
- `own_calls.py`: what the user's code does with tensors, by itself and by PyTorch's modules.
- `packing.py`: decisions of `transformers` on masks and positions.
- `nested.py`: `nn.TransformerEncoder` on padded sequences.
- `composite.py`: operators that PyTorch composes of others.
- `kernels_by_training.py`: operators whose kernels PyTorch chooses by what trains.
- `kernels_by_content.py`: operators whose kernels PyTorch chooses by what tensors contain.
- `deciders.py`: the parameters that decide whether a tensor requires gradients.
- `checkpointing.py`: the model's own gradient checkpointing, switched off.
- `compiled.py`: functions under `torch.compile`.
- `seeding.py`: what seeds PyTorch's random generator, or puts it back.
"""
