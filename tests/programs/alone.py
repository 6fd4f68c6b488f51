"""A run of one process that takes long to save: starts without settings, waits for a signal, saves until `release`."""

import signal
import sys
import time
from pathlib import Path

from tinypod.cluster import startup
from tinypod.cluster.stop import stop_on_signals

folder = Path(sys.argv[1])
signal.alarm(900)  # whatever goes wrong, nothing stays behind
cluster = startup.start(None, timeout_s=300, heartbeat_timeout_s=60)
with stop_on_signals(cluster, say=lambda text: print(f"said: {text}", flush=True)) as stop:
    (folder / "ready").touch()
    while not stop.requested():
        time.sleep(0.01)
    assert stop.by is not None
    (folder / "partial").write_text(f"{cluster.count} {stop.by.name}")
    (folder / "partial").rename(folder / "saving")
    while not (folder / "release").exists():
        time.sleep(0.01)
    (folder / "saved").touch()
if (folder / "linger").exists():  # as copying to a store would, after the loop
    (folder / "left").touch()
    while (folder / "linger").exists():
        time.sleep(0.01)
sys.exit(128 + stop.by)
