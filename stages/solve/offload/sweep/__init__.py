"""Plans by a sweep over the executions of an iteration."""
