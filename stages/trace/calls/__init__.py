"""States facts about calls and their arguments.

- `operators.py`: facts about ATen operators that their schemas do not tell.
- `encoding.py`: arguments as JSON.
- `scalars.py`: numbers among the arguments that do not change how long a call takes.
- `signature.py`: names of calls and tables by their content.
- `numbers.py`: the numbers in which two records of one step differ.
"""
