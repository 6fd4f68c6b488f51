"""What a step needs, what a device has, and errors that say it was too little."""

import ctypes
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tinypod.health.memory import device_bytes, is_out_of_memory, step_bytes

SHAPE = jax.ShapeDtypeStruct((1000,), jnp.float32)


def test_what_a_step_needs() -> None:
    plain = jax.jit(lambda x, y: (x + y, jnp.float32(1))).lower(SHAPE, SHAPE).compile()
    donated = jax.jit(lambda x, y: (x + y, jnp.float32(1)), donate_argnums=0).lower(SHAPE, SHAPE).compile()
    assert step_bytes(plain) == pytest.approx(12_000, abs=200)
    assert step_bytes(donated) == pytest.approx(8_000, abs=200)


class Compiled:
    input_shardings, output_shardings = (), ()

    def __init__(self, sizes: object) -> None:
        self.memory_analysis = lambda: sizes


def test_a_backend_may_not_say() -> None:
    assert step_bytes(Compiled(None)) is None


def test_what_a_device_has() -> None:
    there = device_bytes()
    assert there is None or there > 2**20


def test_an_error_of_this_backend_is_recognised() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jnp.zeros((2**50,), jnp.int8))
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("message", "recognised"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 34359738368 bytes.", True),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", True),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm.", True),
        ("INTERNAL: the program needs (40.10G) exceeds available HBM (15.75G)", True),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", False),
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 311296, available: 232448", False),
        ("INVALID_ARGUMENT: shapes differ", False),
    ],
)
def test_errors_of_others(message: str, recognised: bool) -> None:
    assert is_out_of_memory(jax.errors.JaxRuntimeError(message)) == recognised
    assert not is_out_of_memory(ValueError(message))


AGAIN_AND_AGAIN = """
import resource, threading
from tinypod.health.memory import reuse_freed

def touch():
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        b"x" * size  # not NumPy's: it asks for huge pages
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

reuse_freed()
faults, size = [], 48 * 2**20
thread = threading.Thread(target=touch)  # as XLA does
thread.start()
thread.join()
print(faults[-1])
"""


def test_what_a_step_frees_the_next_one_has() -> None:
    """In a process of its own, because there is no way back; with pages of 4 KiB it would be 12 288 faults."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("not glibc")
    done = subprocess.run([sys.executable, "-c", AGAIN_AND_AGAIN], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100
