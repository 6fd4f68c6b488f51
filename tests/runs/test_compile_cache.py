"""Entries of JAX's cache that a kill or a full disk left behind, in real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Compiles two functions and says how many came from the cache and how many were written to it.
_START = """
import json, sys
import jax
import numpy as np
from tinypod.runs import compile_cache
counts = {"cache_hits": 0, "cache_misses": 0}
def count(event, **_):
    name = event.rsplit("/", 1)[-1]
    counts[name] = counts.get(name, 0) + 1
jax.monitoring.register_event_listener(count)
compile_cache.enable(sys.argv[1])
x = np.ones(3, np.float32)
jax.jit(lambda x: x * x)(x)
jax.jit(lambda x: x + x)(x)
print(json.dumps([counts["cache_hits"], counts["cache_misses"]]))
"""


def start(folder: Path, *, variable: bool = False) -> tuple[list[int], str]:
    """Hits and writes of one start, and all that it said."""
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    del environment["JAX_COMPILATION_CACHE_DIR"]
    if variable:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-c", _START, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-cache"))


@pytest.mark.parametrize("variable", [False, True])
def test_a_damaged_entry_is_written_again(tmp_path: Path, variable: bool) -> None:
    assert start(tmp_path, variable=variable) == ([0, 2], "")
    cut, bent = entries(tmp_path)
    whole = [path.read_bytes() for path in (cut, bent)]
    cut.write_bytes(whole[0][: len(whole[0]) // 2])
    bent.write_bytes(whole[1][:100] + bytes([whole[1][100] ^ 1]) + whole[1][101:])
    counts, said = start(tmp_path, variable=variable)
    assert counts == [0, 2]
    for path in (cut, bent):
        assert said.count(f"{path} was damaged") == 1
    assert "Error reading persistent compilation cache" not in said
    assert start(tmp_path, variable=variable) == ([2, 0], "")


def test_an_entry_without_its_time_of_access_does_not_stop_writing(tmp_path: Path) -> None:
    start(tmp_path)
    first, second = entries(tmp_path)
    Path(str(first).replace("-cache", "-atime")).unlink()  # killed between the two writes
    second.unlink()
    assert start(tmp_path) == ([1, 1], "")
    assert start(tmp_path) == ([2, 0], "")
