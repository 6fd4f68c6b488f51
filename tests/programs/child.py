"""A process without JAX that behaves as asked: `child.py ACTION [FOLDER]`."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

INDEX = int(os.environ.get("TINYPOD_PROCESS_ID", "0"))


def wait(condition: Callable[[], bool] = lambda: False) -> None:
    while not condition():  # `main` sees to an end
        time.sleep(0.01)


def show() -> int:
    print("[Gloo] Rank 0 is connected to 5 peer ranks. Expected number of connected peer ranks is : 5")
    print("[Gloo] Rank 3[Gloo] Rank 2 is connected to 5 peer ranks. Expected number of connected peer ranks is : 5")
    print(" is connected to 5 peer ranks. Expected number of connected peer ranks is : 5")  # the threads do not wait
    print(f"I am {INDEX} of {os.environ.get('TINYPOD_NUM_PROCESSES')}: ✓ [bold]")
    print("to stderr", file=sys.stderr)
    print("no end of line", end="")
    return 0


def one_fails(code: int, folder: Path) -> int:
    """Process 1 fails once all are there; process 2 has something to say about it; the others are deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"here_{INDEX}").touch()
    if INDEX == 1:
        wait(lambda: len(list(folder.glob("here_*"))) == 4)
        (folder / "partial").write_text(str(os.getpid()))
        (folder / "partial").rename(folder / "pid_1")
        return code
    if INDEX == 2:
        wait(lambda: (folder / "pid_1").exists())
        wait(lambda: not exists(int((folder / "pid_1").read_text())))
        print("process 1 is gone")
        return 76
    wait()
    return 0


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def waits(folder: Path, on_signal) -> int:
    signal.signal(signal.SIGTERM, on_signal)
    (folder / f"partial_{INDEX}").write_text(str(os.getpid()))
    (folder / f"partial_{INDEX}").rename(folder / f"pid_{INDEX}")
    wait()
    return 0


def saves_long(folder: Path) -> None:
    (folder / f"saving_{INDEX}").touch()
    wait((folder / "release").exists)
    saves_and_ends()


def saves_and_ends(*_: object) -> None:
    print("saved")
    sys.exit(143)


def as_asked(folder: Path) -> int:
    """The next line of `ends`: the step to reach and the exit code, or `wait`."""
    lines = (folder / "ends").read_text().splitlines()
    done = int((folder / "starts").read_text()) if (folder / "starts").exists() else 0
    (folder / "starts").write_text(str(done + 1))
    step, code = lines[done].split()
    if step != "-":
        (folder / "step").write_text(step)
    if code == "wait":
        return waits(folder, saves_and_ends)
    if code == "2":
        print("error: gs://tpyo: no such bucket")
    if code == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(code)


def main() -> int:
    signal.alarm(900)
    action, folder = sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
    if action.startswith("one_fails="):
        return one_fails(int(action.split("=")[1]), folder)
    return {
        "show": show,
        "waits": lambda: waits(folder, saves_and_ends),
        "saves_long": lambda: waits(folder, lambda *_: saves_long(folder)),
        "deaf": lambda: waits(folder, signal.SIG_IGN),
        "as_asked": lambda: as_asked(folder),
    }[action]()


if __name__ == "__main__":
    sys.exit(main())
