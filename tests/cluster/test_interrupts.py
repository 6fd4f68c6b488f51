"""Ctrl-C is heard while the main thread is inside a library: what no handler of Python's own does."""

import signal
import subprocess
import sys

PROGRAM = """
import hashlib, signal
from tinypod.cluster.interrupts import heard

signal.signal(signal.SIGINT, lambda *_: None)  # else it ends a process that is not yet that far
with heard(lambda: print("told", flush=True)):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour in C, without Python's lock
"""


def test_the_first_is_told_at_once_and_the_second_ends_the_process() -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "told\n"
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=300) == 130
        finally:
            process.kill()
