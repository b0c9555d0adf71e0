"""Ctrl-C, from the first line of a command to its last."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import stop_while_importing


GRACE = 5.0  # seconds in which what was begun is removed, however often Ctrl-C is pressed


@contextmanager
def interruptible() -> Iterator[None]:
    """Within this context Ctrl-C raises KeyboardInterrupt, but not again for `GRACE` seconds. Forked processes get it
    too, and end without a word."""
    process, last = os.getpid(), -math.inf

    def interrupt(number: int, frame: Any) -> None:
        nonlocal last
        if os.getpid() != process:
            os._exit(130)
        if time.monotonic() - last > GRACE:
            last = time.monotonic()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:  # a command has nothing left to do then: it may end at once, which a shell calls 130 as well
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is stop_while_importing else before)
