"""What a compiled step needs of a device's memory, what a device has, whether an error says that it ran out; and, where
the device is the CPU, that what one step frees is there for the next."""

import ctypes
import os
import re
from typing import Any

import jax

_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out[ _]of[ _]memory|exceeds available HBM", re.IGNORECASE)
# A kernel that wants too much of a core's own memory, which has nothing to do with what the device has.
_OF_A_KERNEL = re.compile(r"memory space (vmem|smem|cmem)|shared memory size limit", re.IGNORECASE)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # their numbers in glibc's malloc.h


def step_bytes(compiled: Any) -> int | None:
    """What a compiled function allocates on one device, its arguments included; None where the backend does not say.

    The TPU compiler's peak is the number that it holds against the HBM. Elsewhere the peak may leave temporaries out,
    and the sizes of the buffers are added up.
    """
    sizes = compiled.memory_analysis()
    if sizes is None:
        return None
    if _is_for_tpu(compiled):
        return int(sizes.peak_memory_in_bytes)
    total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return int(total - sizes.alias_size_in_bytes)  # an output in an argument's place


def _is_for_tpu(compiled: Any) -> bool:
    """By the devices it was compiled for, which need not be here."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices: list[Any] = [d for s in shardings if isinstance(s, jax.sharding.Sharding) for d in s.device_set]
    return bool(devices) and devices[0].platform == "tpu"


def device_bytes() -> int | None:
    """What a local device has for arrays; None where it does not say. CPU devices share the machine's memory."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None or device.platform != "cpu":
        return limit
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    except (ValueError, OSError):
        return None


def reuse_freed() -> None:
    """On CPUs XLA allocates a step's temporaries anew each time. Large ones glibc gives back to the system at once, and
    the system clears every page again: a sixth of the demo's step. Here they stay with the process, as far as glibc's
    heaps of threads go (64 MiB). Other C libraries have no `mallopt`, and are left alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or jax.local_devices()[0].platform != "cpu":
        return
    # glibc before 2.35 takes no more than 32 MiB for the first; with the second alone it would map what it kept.
    if mallopt(_M_MMAP_THRESHOLD, 2**30) or mallopt(_M_MMAP_THRESHOLD, 2**25):
        mallopt(_M_TRIM_THRESHOLD, 2**30)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had too little memory, at compiling or running; on TPU, GPU and CPU."""
    text = str(error)
    return (
        isinstance(error, jax.errors.JaxRuntimeError)
        and _OUT_OF_MEMORY.search(text) is not None
        and _OF_A_KERNEL.search(text) is None
    )
