"""Ctrl-C, heard at once.

Python runs its handlers in the main thread only, and not while that waits for a compiler, which may take minutes. So a
thread of our own reads the numbers of the signals that came from a pipe, into which Python's part in C writes them the
moment they come (signal.set_wakeup_fd).
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def heard(tell: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT calls `tell`, in a thread, whatever its handler does; the second ends the process."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    listener = threading.Thread(target=_listen, args=(reading, tell), name="tinypod-signals", daemon=True)
    listener.start()
    outer = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(outer)
        os.close(writing)
        listener.join()
        os.close(reading)


@contextmanager
def unheard() -> Iterator[None]:
    """Inside `heard`, for who has a loop of its own that hears them."""
    outer = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(outer)


def _listen(pipe: int, tell: Callable[[], None]) -> None:
    interrupts = 0
    while came := os.read(pipe, 64):  # a byte for each signal; nothing once the other end is closed
        for _ in range(came.count(signal.SIGINT)):
            interrupts += 1
            if interrupts > 1:
                _end()
            # Apart: a screen that hangs must not keep the second one from being heard.
            threading.Thread(target=tell, name="tinypod-answer", daemon=True).start()


def _end() -> None:
    if os.isatty(1):
        os.write(1, b"\x1b[?25h\r\n")  # the cursor, which a live line has hidden
    os._exit(128 + signal.SIGINT)  # an exception raised inside the compiler would crash it
