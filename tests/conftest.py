"""8 fake CPU devices, strict dtypes, no silent broadcasting: set before JAX starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

from hypothesis import settings  # noqa: E402

settings.register_profile("tinypod", deadline=None, derandomize=True)  # tests time nothing, and fail alike everywhere
settings.load_profile("tinypod")
