"""Processes that end with the one that started them."""

import os
import sys

# Linux kills a child with its parent if asked to by the child; what it runs then inherits that. The request is made in
# an interpreter of its own (15 ms), because code between fork and exec is not safe in a parent with threads.
_STUB = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(137)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def with_parent(argv: list[str]) -> list[str]:
    """The command that runs `argv` and is killed when this process ends, from its first moment on. Linux only:
    elsewhere it is `argv` itself. To the kernel the parent is the thread that starts it: start it from one that stays.
    """
    return [sys.executable, "-S", "-c", _STUB, str(os.getpid()), *argv] if sys.platform == "linux" else argv
