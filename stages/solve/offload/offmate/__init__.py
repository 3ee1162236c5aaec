"""OffMate (thesis 4): `choices.py` and `problem.py` make the problem that O-ILP solves, `answer.py` translates its
answer, and `search.py` proposes plans and asks again."""
