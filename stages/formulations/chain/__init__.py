"""Which option each block of the chain runs with."""
