"""Start one process for each rank on this machine, with gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MARK = "RESULT "


def run_on_ranks(module: str, *arguments: str, ranks: int = 2, limit_s: float = 300.0) -> list[Any]:
    """Run `python -m module arguments` on each rank; return what each has said with `say`.

    All are ended when one fails, or when the time is over.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with ExitStack() as stack:  # files, since a full pipe would stop a rank that the others wait for
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, output in enumerate(outputs)
        ]
        _wait(processes, time.monotonic() + limit_s)
        said = []
        for output in outputs:
            output.seek(0)
            said.append(output.read())
    codes = [process.returncode for process in processes]
    assert not any(codes), f"exit codes {codes}\n" + "\n".join(text[-3000:] for text in said)
    return [json.loads(line[len(MARK) :]) for text in said for line in text.splitlines() if line.startswith(MARK)]


def _wait(processes: list[subprocess.Popen[str]], end: float) -> None:
    try:
        while any(p.poll() is None for p in processes):
            if any(p.poll() for p in processes) or time.monotonic() > end:
                time.sleep(1.0)  # the others may be about to say why
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def say(result: Any) -> None:
    """In a child: hand a result to `run_on_ranks`."""
    # In one write: under torchrun ranks share a pipe, unbuffered, and `print` would write the end of a line by itself.
    sys.stdout.write(f"{MARK}{json.dumps(result)}\n")
    sys.stdout.flush()
