"""Runs a few worker processes with a queue of requests, which may grow while they work."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from stowage.stages.options.workers.worker import Request, perform

Answer = dict[str, Any]
Follow = Callable[[Answer], Iterable["Job"]]


class Job:
    """A request with a function that takes its answer and returns more jobs."""

    def __init__(self, request: Request, follow: Follow) -> None:
        self.request = request
        self.follow = follow


def work(jobs: Iterable[Job], workers: int) -> None:
    """Do all jobs and those that follow from them; `follow` is called in this thread, in no particular order.

    Raises:
        RuntimeError: a task failed in a worker, or the worker ended before it answered.
    """
    waiting = list(jobs)
    if workers <= 1 or len(waiting) == 0:
        while waiting:
            job = waiting.pop(0)
            # Pass the answer through JSON, so that it equals that of a worker process.
            waiting.extend(job.follow(json.loads(json.dumps(perform(job.request)))))
        return
    todo: queue.Queue[Job | None] = queue.Queue()
    done: queue.Queue[tuple[Job, Answer | BaseException]] = queue.Queue()
    processes: list[subprocess.Popen[str]] = []
    threads = [threading.Thread(target=_serve, args=(todo, done, processes), daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    pending = len(waiting)
    for job in waiting:
        todo.put(job)
    try:
        while pending:
            job, answer = done.get()
            pending -= 1
            if isinstance(answer, BaseException):
                raise answer
            for following in job.follow(answer):
                pending += 1
                todo.put(following)
    except BaseException:  # nobody waits for the remaining solves
        for process in processes:
            process.kill()
        raise
    finally:
        while not todo.empty():
            todo.get_nowait()
        for _ in threads:
            todo.put(None)
        for thread in threads:
            thread.join()


def _serve(
    todo: queue.Queue[Job | None],
    done: queue.Queue[tuple[Job, Answer | BaseException]],
    processes: list[subprocess.Popen[str]],
) -> None:
    """Feed one worker process; Ctrl-C does not reach it, since this process reports it and ends the worker."""
    command = [sys.executable, "-m", "stowage.stages.options.workers.worker"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, process_group=0) as process:
        processes.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        while (job := todo.get()) is not None:
            try:
                process.stdin.write(json.dumps(job.request) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"a solver process ended with code {process.wait()} before it answered")
                answer = json.loads(line)
                if "error" in answer:
                    raise RuntimeError(f"a solver process failed: {answer['error']}")
                done.put((job, answer))
            except BaseException as error:
                done.put((job, error))
                break
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
