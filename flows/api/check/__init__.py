"""Checks a planned step by running the user's own forward beside it now and then.

- `when.py`: when the check runs: the argument `check` of `fit`.
- `shadow.py`: runs the check and compares the numbers.
- `plain_step.py`: one whole iteration in plain PyTorch, undone afterwards.
- `observer.py`: reads gradients and generators while a planned iteration runs.
- `all_ranks.py`: raises on all ranks what one of them finds.
- `agreement.py`: decides whether two results agree, and words the error if not.
"""
