"""A run of one process that takes long to save: starts without settings, waits for a signal, then for another."""

import sys
import time
from pathlib import Path

from tinypod.cluster import startup as distributed

folder = Path(sys.argv[1])
cluster = distributed.start(None, timeout_s=300, heartbeat_timeout_s=10)
with distributed.stop_on_signals(cluster) as stop:
    (folder / "ready").touch()
    end = time.monotonic() + 60
    while not stop.requested() and time.monotonic() < end:
        time.sleep(0.01)
    (folder / "saving").write_text(f"{cluster.count} {stop.by and stop.by.name}")
    while time.monotonic() < end:
        time.sleep(0.01)
