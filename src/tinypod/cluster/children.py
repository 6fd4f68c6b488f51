"""Children that do not outlive their parent."""

import os
import sys

# Linux kills a child with its parent if the child asks for it; what it runs then inherits that. The request is made in
# an interpreter of its own (15 ms), because code between fork and exec is not safe in a parent with threads. Elsewhere
# orphans end when they next print, and with their process 0.
WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(137)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def with_parent(argv: list[str]) -> list[str]:
    """The command that runs `argv` and ends with this process."""
    if sys.platform != "linux":
        return argv
    return [sys.executable, "-S", "-c", WITH_PARENT, str(os.getpid()), *argv]
