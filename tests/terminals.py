"""Real terminals for tests: a process in a pseudo-terminal of a given width, and what it has written there."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NOT_KEPT = ("COLUMNS", "LINES", "NO_COLOR")
_QUICK = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}  # to compile, on one device
PATIENCE_S = 600.0  # of a test, with a machine that is busy with others


class Terminal:
    """`tinypod ARGUMENTS` in a terminal. What it wrote is read while it is waited for."""

    def __init__(self, arguments: Sequence[str], width: int, environ: Mapping[str, str] | None = None) -> None:
        self.width, self.output = width, ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_KEPT}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tinypod", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**kept, "TERM": "xterm-256color", **_QUICK, **(environ or {})},
            start_new_session=True,
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def wait_for(self, pattern: str, since: int = 0) -> re.Match[str]:
        """Until it has written this, after the first `since` characters."""
        end = time.monotonic() + PATIENCE_S
        while (found := re.compile(pattern).search(self.output, since)) is None:
            assert time.monotonic() < end, f"{pattern} did not come:\n{self.text}"
            assert self._read(), f"it ended without {pattern}:\n{self.text}"
        return found

    def end(self) -> int:
        """Its exit code, once it has ended."""
        while self._read():
            pass
        return self.process.wait(timeout=PATIENCE_S)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    @property
    def text(self) -> str:
        return _CONTROL.sub("", self.output)

    @property
    def lines(self) -> list[str]:
        """All that stood in a line at any time: a live line is written again and again."""
        return [line.rstrip() for line in re.split(r"[\r\n]+", self.text)]

    def _read(self) -> bool:
        if not select.select([self._master], [], [], 1.0)[0]:
            return True
        try:
            chunk = os.read(self._master, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.output += chunk.decode(errors="replace")
        return bool(chunk)
