"""The net under a planned step: the user's own forward, run beside it now and then."""
