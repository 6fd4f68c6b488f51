"""8 fake CPU devices, strict dtypes, no silent broadcasting: set before JAX starts. And what CI has no time for."""

import atexit
import hashlib
import os
import platform
import shutil
import tempfile
import time

import pytest
from hypothesis import settings

# The second task: one module, known to this process and to the commands that tests start.
os.environ["TINYPOD_TASKS"] = "toy_task"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"  # not 40: these cores may be busy
)
if platform.machine() in ("x86_64", "AMD64"):
    # No fused multiply-adds, which one program has where another has none: two programs of one formula round alike.
    os.environ["XLA_FLAGS"] += " --xla_cpu_max_isa=AVX"
# Threads of XLA's pool. Collectives of 8 devices block theirs, several at a time: with one a device they may all wait.
os.environ["NPROC"] = "32"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# Most of the tests' time is compiling: hence level 0, and what one test or process compiled serves the others.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers of xdist have that of the process that started them
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="tinypod-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

settings.register_profile("tinypod", deadline=None, derandomize=True)  # tests time nothing, and fail alike everywhere
settings.load_profile("tinypod")

STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within-s", type=float, help="begin no test after so many seconds; what is left is skipped")
    parser.addoption("--first", default="", help="with --within-s: any text; another one puts other files first")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("within_s") is not None:
        text = config.getoption("first")
        items.sort(key=lambda item: hashlib.sha256(f"{text} {item.path.name}".encode()).digest())


def pytest_runtest_setup(item: pytest.Item) -> None:
    within_s = item.config.getoption("within_s")
    if within_s is not None and time.monotonic() - STARTED > within_s:
        pytest.skip("no time left here; `make test-all` runs it")
