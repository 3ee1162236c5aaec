"""`python a_step.py REQUEST ANSWER`: what a step's process may do, without importing anything large.

`does` in the request says what: it answers so, or raises, dies, hangs. Each run adds a line to the file `runs`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from stowage.flows.benchmarks.gpu.process import obey


def hang_here() -> None:
    """Longer than any limit."""
    time.sleep(600)


def main() -> None:
    """Do it."""
    obey()
    asked = json.loads(Path(sys.argv[1]).read_text())
    with open(asked["runs"], "a") as file:
        file.write(f"{asked['step']} {os.getpid()}\n")
    does = asked["does"]
    print(f"this is {asked['step']}", flush=True)
    if does == "raise":
        raise ValueError("it has a mistake")
    if does == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if does == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(asked["runs"], "a") as file:
            file.write(f"child {child.pid}\n")
        hang_here()
    if does == "half":
        Path(sys.argv[2]).write_text('{"status": "he')
        return
    why = "it is not so" if does in ("fell", "not run") else ""
    status = "held" if does == "die late" else does
    answer = {"status": status, "why": why, "numbers": {"told": asked.get("besides", 0)}, "lines": ["a line"]}
    Path(sys.argv[2]).write_text(json.dumps(answer))
    if does == "die late":
        os.kill(os.getpid(), signal.SIGABRT)


if __name__ == "__main__":
    main()
