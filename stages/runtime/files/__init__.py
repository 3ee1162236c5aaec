"""Reads and writes tensors in files, one at a time.

- `tensor_file`: files in the safetensors format.
- `folder`: checkpoints that several ranks have written.
- `source`: what both have in common for those who read them.
- `torch_file`: files for `torch.load`.
- `weights`: models whose weights stay in files until a plan places them.
"""
