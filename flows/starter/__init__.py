"""Makes a Stowage project out of anyone's repository; the command is `stowage init`.

- `start.py`: all of it in order.
- `answers.py`: finds which model the project plans.
- `changes.py`: decides what to write and what to leave.
- `merge.py`: joins the text of an existing file with the text that is wanted.
- `templates.py`: fills in the texts of the files, which are in `templates/`.
- `repository.py`: Git and DVC of the repository.
"""
