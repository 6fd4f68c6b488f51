"""The TPU compiler in tests: in a process of its own, as it is loaded once and for all and may end the process."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tinypod.planning.compiler import ALONE

needs_compiler = pytest.mark.skipif(
    find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ, reason="needs libtpu (extra `plan`)"
)


def run(program: str, given: str = "") -> str:
    """What a Python program prints that may use the compiler."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | ALONE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
