"""Reads and writes tensors in files, one at a time.

- `tensor_file`: files in the safetensors format.
- `torch_file`: files for `torch.load`.
- `weights`: models whose weights stay in files until a plan places them.
"""
