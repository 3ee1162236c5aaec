"""Options of large blocks, cluster by cluster."""
