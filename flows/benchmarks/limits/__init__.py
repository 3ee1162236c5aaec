"""Training under a memory limit of the kernel."""
