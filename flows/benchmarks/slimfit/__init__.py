"""Trains real tasks with units frozen by every policy, and measures memory and time of what may be frozen and packed.

- `corpora`: data that are on every machine: Python's sources and documentation, and scikit-learn's digits.
- `tasks`: three tasks, each a small model that was trained on something else before.
- `pretraining`: what it was trained on before.
- `coded`: forward and backward with values in codes, as a plan with leave has them.
- `trials`: one training run under one policy.
- `study`: all of them, stored one by one.
- `summary`: means and deviations.
- `figure`: draws accuracy against the share of units that are frozen.
- `models`: the models of the SlimFit paper, with smaller batches.
- `saved_by_ils`: measures what forward saves under the units that ILS chooses in a short run.
- `saved`: bytes that forward saves for backward, predicted and measured, against the freezing rate.
- `saved_in_codes`: the same bytes with freezing and codes together.
- `static`: what of these bytes freezing does not spare, and what they are for.
- `lossy_plans`: plans with and without leave for codes: time, peak and what the gradient pays.
- `by_the_cpu`: lets a machine without a GPU plan and run updates by the CPU.
- `pairs`: techniques that save memory alone, in pairs and all at once.
- `pair_job`: plans and measures a step with some of them.
- `pairs_on_ranks`: the same on two ranks.
- `pages`: describes the page.
- `run`: the command.
"""
