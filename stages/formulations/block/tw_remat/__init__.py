"""TW-Remat: rematerialization along a tree decomposition."""
