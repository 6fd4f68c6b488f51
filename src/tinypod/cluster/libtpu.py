"""The TPU's library, where it is installed and a TPU is not: on a laptop that plans.

JAX tries it all the same, and it complains, after it has asked Google Cloud what TPU this is.
"""

import os
from pathlib import Path

DEV = Path("/dev")  # where the chips of a TPU are


def quieten() -> None:
    """Before JAX looks for devices. Where there is a TPU nothing is changed: what the library says there is worth
    reading."""
    if any([*DEV.glob("accel[0-9]*"), *DEV.glob("vfio/[0-9]*")]):
        return
    for name in ("TPU_STDERR_LOG_LEVEL", "TPU_MIN_LOG_LEVEL"):
        os.environ.setdefault(name, "3")  # fatal errors only
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # What it would have asked. Any answer will do, for it finds no chips; without one it complains at any level.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
