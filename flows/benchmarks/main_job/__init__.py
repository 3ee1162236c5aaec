"""The job of `params.yaml` beside plain PyTorch."""
