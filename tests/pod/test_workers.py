"""What is sent to workers, what runs there, and what comes back: with real processes in a folder a worker."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from specs import make_spec
from stand_in import Cloud
from test_gcloud import HOSTILE
from test_lifecycle import recording, text

from tinypod.errors import UserError
from tinypod.pod import ship
from tinypod.pod.gcloud import Gcloud
from tinypod.pod.workers import WorkerError, Workers, read_places, write_places

# In place of the package: prints what it was given, and does as it is told.
PROGRAM = """
import json, os, signal, sys, time
def stop(*_):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print(json.dumps([sys.argv[1:], os.environ.get("GREETING"), os.getcwd()]), flush=True)
if "wait" in sys.argv:
    time.sleep(600)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    time.sleep(600)
sys.exit(int(sys.argv[-1]) if sys.argv[-1].isdecimal() else 0)
"""
FILES = {"tinypod/__init__.py": b"", "tinypod/__main__.py": PROGRAM.encode(), "config.yaml": b"steps: 1\n"}


def wait_for(condition: Callable[[], object], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came to it"
        time.sleep(0.02)


@pytest.fixture
def workers(cloud: Cloud) -> Workers:
    gcloud = Gcloud(make_spec(python=sys.executable))
    gcloud.create_node()
    return Workers(gcloud)


def collect(workers: Workers) -> list[str]:
    """All that each worker printed until it ended."""
    texts = [b""] * workers.count
    states = []

    def ended() -> bool:
        reports = workers.reports()
        for worker, report in enumerate(reports):
            assert report.unreachable is None, report.unreachable
            texts[worker] += report.log
        states[:] = [report.state for report in reports]
        return set(states) == {"ended"} and not any(report.log for report in reports)

    wait_for(ended)
    return [said.decode() for said in texts]


def test_only_what_changed_is_sent(cloud: Cloud, workers: Workers) -> None:
    console = recording()
    workers.send(FILES, console)
    for worker in range(2):
        home = cloud.home("trainer", worker) / "tinypod"
        assert (home / "code" / "tinypod" / "__main__.py").read_text() == PROGRAM
        assert json.loads((home / "manifest.json").read_text()) == ship.manifest_of(FILES)
    assert "sending 3 of 3 files" in text(console)

    before = len(cloud.calls())
    workers.send(FILES, console)
    assert cloud.commands()[before:] == ["tpu-vm ssh"] * 2  # asked what they have, and that was all
    assert "have the code already" in text(console)

    changed = {**FILES, "config.yaml": b"steps: 2\n", "tinypod/new.py": b"1"}
    del changed["tinypod/__init__.py"]
    workers.send(changed, console)
    assert "sending 2 of 4 files" in text(console) or "sending 2 of 3 files" in text(console)
    code = cloud.home("trainer", 1) / "tinypod" / "code"
    assert {p.relative_to(code).as_posix() for p in code.rglob("*") if p.is_file()} == {*changed, "manifest.json"}


def test_one_worker_that_lacks_something_gets_it(cloud: Cloud, workers: Workers) -> None:
    """It was replaced, or the copy was cut off before its manifest was written."""
    workers.send(FILES, recording())
    (cloud.home("trainer", 1) / "tinypod" / "manifest.json").unlink()
    console = recording()
    workers.send(FILES, console)
    assert "sending 3 of 3 files" in text(console)


def test_what_did_not_arrive_whole_is_noticed(cloud: Cloud, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ship.archive
    monkeypatch.setattr(ship, "archive", lambda files, names: real({**files, "config.yaml": b"cut"}, names))
    manifest = ship.manifest_of(FILES)
    monkeypatch.setattr(ship, "manifest_of", lambda files: manifest)
    with pytest.raises(WorkerError, match=r"worker 0 of trainer: settle: did not arrive whole: config.yaml"):
        workers.send(FILES, recording())


def test_training_gets_its_words_unchanged(cloud: Cloud, workers: Workers) -> None:
    workers.send(FILES, recording())
    words, all_of_them = ["train", *(f"--run={word}" for word in HOSTILE)], "\n".join(HOSTILE)
    assert workers.start(all_of_them, words, {"GREETING": all_of_them})
    for said in collect(workers):
        line = next(line for line in said.splitlines() if line.startswith("[["))
        arguments, greeting, folder = json.loads(line)
        assert arguments == words
        assert greeting == all_of_them
        assert folder.endswith("tinypod/code")
    assert not list(cloud.folder.rglob("pwned"))


def test_it_goes_on_without_us_and_is_started_once(cloud: Cloud, workers: Workers) -> None:
    workers.send(FILES, recording())
    assert workers.start("gs://b/x", ["wait"], {})
    assert not workers.start("gs://b/x", ["wait"], {})  # attaches
    with pytest.raises(WorkerError, match="start: another run is being trained here: gs://b/x"):
        workers.start("gs://b/y", ["wait"], {})
    again = Workers(workers.gcloud)  # another machine's
    wait_for(lambda: all(b"wait" in report.log for report in again.reports()) or again.places.clear())
    assert [report.state for report in again.reports()] == ["running"] * 2
    again.stop(60)
    assert all(said.endswith("saved\n") for said in collect(workers))
    assert [report.code for report in workers.reports()] == [143, 143]


def test_a_python_that_is_not_there(cloud: Cloud) -> None:
    gcloud = Gcloud(make_spec(type="v4-8", python="/opt/none/bin/python"))
    gcloud.create_node()
    workers = Workers(gcloud)
    workers.send(FILES, recording())
    with pytest.raises(WorkerError, match=r"there is no Python at /opt/none/bin/python: check `python:` in the spec"):
        workers.start("gs://b/x", ["train"], {})


def test_one_that_does_not_stop_is_killed(workers: Workers) -> None:
    workers.send(FILES, recording())
    workers.start("gs://b/x", ["stubborn"], {})
    seen = [b""]

    def deaf() -> bool:
        seen[0] += b"".join(report.log for report in workers.reports())
        return seen[0].count(b"deaf") == 2

    wait_for(deaf)
    workers.stop(0.2)
    wait_for(lambda: [report.code for report in workers.reports()] == [137, 137])


def test_a_worker_that_lost_its_process_says_so(cloud: Cloud, workers: Workers) -> None:
    workers.send(FILES, recording())
    workers.start("gs://b/x", ["wait"], {})
    job = json.loads((cloud.home("trainer", 1) / "tinypod" / "job.json").read_text())
    os.kill(job["nurse"], signal.SIGKILL)
    os.killpg(job["pid"], signal.SIGKILL)
    wait_for(lambda: [report.state for report in workers.reports()] == ["running", "ended"])
    assert workers.reports()[1].code == 137
    workers.stop(60)


def test_exit_codes_come_back_and_logs_are_read_once(workers: Workers, tmp_path: Path) -> None:
    workers.send(FILES, recording())
    workers.start("gs://b/x", ["train", "76"], {})
    first = collect(workers)
    assert [report.code for report in workers.reports()] == [76, 76]
    write_places(tmp_path / "places.json", workers.places)
    again = Workers(workers.gcloud, read_places(tmp_path / "places.json"))
    assert [report.log for report in again.reports()] == [b"", b""]
    workers.start("gs://b/x", ["train", "0"], {})
    assert all("--- " in said and said not in first for said in collect(workers))
    assert read_places(tmp_path / "nothing") == {}


def test_a_new_machine_s_log_is_read_from_its_beginning(cloud: Cloud, workers: Workers) -> None:
    for _ in range(2):
        workers.send(FILES, recording())
        workers.start("gs://b/x", ["train", "0"], {})
        assert all('["train", "0"]' in said for said in collect(workers))
        cloud.destroy("trainer")


def test_one_that_cannot_be_reached_is_named(cloud: Cloud, workers: Workers) -> None:
    workers.send(FILES, recording())
    cloud.order(bad_worker=1)
    good, bad = workers.reports()
    assert good.unreachable is None
    assert "gcloud tpu-vm ssh trainer (worker 1) ended with exit code 1" in (bad.unreachable or "")
    with pytest.raises(UserError, match=r"worker 1.*\n.*Connection timed out"):
        workers.start("gs://b/x", ["train"], {})


def write_wheel(folder: Path) -> Path:
    """A package that needs no index."""
    path = folder / "locked-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("locked.py", "WORD = 'from the wheel'\n")
        wheel.writestr("locked-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: locked\nVersion: 1.0\n")
        wheel.writestr("locked-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("locked-1.0.dist-info/RECORD", "")
    return path


@pytest.mark.slow
def test_the_environment_is_made_once_from_the_locked_versions(cloud: Cloud, tmp_path: Path) -> None:
    gcloud = Gcloud(make_spec(type="v4-8"))
    gcloud.create_node()
    workers, home = Workers(gcloud), cloud.home("trainer", 0) / "tinypod"

    def settle(requirements: bytes) -> dict:
        home.mkdir(parents=True, exist_ok=True)
        files = {**FILES, "requirements.txt": requirements}
        (home / "worker.py").write_bytes(Path(ship.__file__).with_name("worker.py").read_bytes())
        for name, content in {**files, "manifest.json": json.dumps(ship.manifest_of(files)).encode()}.items():
            path = home / "code" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        said = gcloud.ssh(0, [sys.executable, "tinypod/worker.py", "settle", json.dumps({"version": version})])
        return json.loads((said or "").partition("tinypod-worker:")[2])

    assert settle(b"") == {"files": 4}
    python = home / "env" / "bin" / "python"
    assert python.exists()
    born = python.lstat().st_mtime_ns
    assert settle(b"") == {"files": 4}
    assert python.lstat().st_mtime_ns == born
    assert settle(f"{write_wheel(tmp_path)}\n".encode()) == {"files": 4}
    said = subprocess.run([python, "-c", "import locked; print(locked.WORD)"], capture_output=True, check=True).stdout
    assert said == b"from the wheel\n"
    failed = settle(b"./no_such_package\n")
    assert "-m pip install" in failed["error"]
    assert workers.reports()[0].state == "none"


def test_the_locked_versions_are_those_installed_here() -> None:
    import importlib.metadata

    lines = ship.locked_requirements().splitlines()
    named = {line.split("==")[0]: line for line in lines}
    for package in ("jax", "jaxlib", "optax", "gcsfs", "tensorstore"):
        assert named[package] == f"{package}=={importlib.metadata.version(package)}"
    assert any(line.startswith("libtpu") for line in lines)
    assert not named.keys() & {"tinypod", "pytest", "torch", "transformers", "ruff"}


def test_what_is_shipped(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("task.py", "task.yaml", ".env", "key.json", "weights.npz"):
        (tmp_path / "mine" / name).write_text("x")
    files = ship.files_to_ship({"config.yaml": "steps: 1\n"}, [str(tmp_path / "mine")])
    assert {"task.py", "task.yaml", "config.yaml", "requirements.txt", "tinypod/training.py"} <= files.keys()
    assert {"tinypod/configs/demo.yaml", "tinypod/planning/prices.yaml"} <= files.keys()
    assert not {".env", "key.json", "weights.npz"} & files.keys()
    with pytest.raises(UserError, match="code: there is no folder"):
        ship.files_to_ship({}, [str(tmp_path / "other")])
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "task.py").write_text("y")
    with pytest.raises(UserError, match=r"two folders have a task.py"):
        ship.files_to_ship({}, [str(tmp_path / "mine"), str(tmp_path / "theirs")])
