"""What the command line does with `--processes` or `--supervise`, around any command: `launcher.py LOGS N COMMAND...`.

With N = 0 it is one supervised process that waits for a minute before it starts again.
"""

import signal
import sys
from pathlib import Path

from rich.console import Console

from tinypod.cluster.launch import launch, run_child
from tinypod.cluster.supervise import supervise


def main() -> int:
    signal.alarm(900)
    logs, processes, command = Path(sys.argv[1]), int(sys.argv[2]), [sys.executable, *sys.argv[3:]]
    console = Console()
    if processes:
        return launch(command, processes, 2, logs, output=console, grace_s=3)
    return supervise(
        lambda: run_child(command, logs, output=console),
        lambda: None,
        console=console,
        first_wait_s=60,
        give_up_after=9,
    )


if __name__ == "__main__":
    sys.exit(main())
