"""A rank that waits long says once what it waits for."""

from __future__ import annotations

import threading
import time

from stowage.stages.runtime.sharding.watch import Watch


class Event:
    """Stands for an event of a GPU."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


def threads() -> int:
    return sum(thread.name == "stowage-watch" for thread in threading.enumerate())


def watch(said: list[str]) -> Watch:
    return Watch(3, say=said.append, long_s=0.1, look_s=0.02)


def wait_until_no_thread() -> None:
    end = time.monotonic() + 5
    while threads() and time.monotonic() < end:
        time.sleep(0.02)
    assert not threads()


def test_what_takes_long_is_said_once_and_what_does_not_is_not() -> None:
    said: list[str] = []
    watched = watch(said)
    for _ in range(100):
        with watched.waiting("the gather of 'short'"):
            pass
    with watched.waiting("the gather of 'long'"):
        time.sleep(0.6)
    wait_until_no_thread()
    assert said == [
        "Rank 3 has waited 0 s for the gather of 'long': another rank is slower, hangs, or does something else."
    ]


def test_an_exchange_on_a_gpu_is_watched_until_its_event() -> None:
    said: list[str] = []
    watched = watch(said)
    over, hangs = Event(), Event()
    over.is_over = True
    watched.until(over, "the gather of 'over'")
    watched.until(hangs, "the scatter of the gradient of 'weight'")
    time.sleep(0.6)
    assert len(said) == 1
    assert "the scatter of the gradient of 'weight'" in said[0]
    hangs.is_over = True
    wait_until_no_thread()
