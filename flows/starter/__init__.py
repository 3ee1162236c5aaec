"""Makes a Stowage project out of anyone's repository; the command is `stowage init`.

`answers` (which model), `templates` (texts of the files, with what differs between projects filled in), `merge` (one
text out of what is there and what is wanted), `changes` (what to write and what to leave), `repository` (Git and DVC)
and `start` (all of it in order).
"""
