"""From node executions to rows of a plan."""
