"""Several processes share a study: every run is trained once, by one of them; what one leaves, another takes."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

import gcs
from fixtures import CONFIGS, TINY, write_4x4
from tinypod import config as configs
from tinypod.runs.folder import Run, open_run
from tinypod.study import claims
from tinypod.study.claims import Worker, choosing, claim, is_free
from tinypod.study.file import Study, load_study
from tinypod.study.folder import read_outcome, refresh, run_of

LIMIT_S = 900


def test_shares_shrink_with_what_is_left() -> None:
    """27 runs of one shape over 8 hosts of 4 devices; then the same with two runs a device."""

    def sizes(runs: int, worker: Worker, num_devices: int) -> list[int]:
        found = []
        while runs:
            found.append(min(worker.most(runs, num_devices) or runs, runs))
            runs -= found[-1]
        return found

    assert sizes(27, Worker(count=8), 4) == [4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    assert sizes(64, Worker(count=8), 4)[:8] == [8, 8, 8, 8, 4, 4, 3, 3]
    assert sizes(5, Worker(count=1), 4) == [5]
    assert Worker(count=2).most(40, 4, limit=7) == 7


def test_a_run_has_one_owner(tmp_path: Path) -> None:
    study = Run(tmp_path)
    places = [run_of(tmp_path, name) for name in "abc"]
    one, two = Worker(0, 2), Worker(1, 2)
    with ExitStack() as first, ExitStack() as second:
        with choosing(study, one):
            assert claim(first, places[:2], one) == [True, True]
        assert [is_free(place, two) for place in places] == [False, False, True]
        again = [run_of(tmp_path, name) for name in "abc"]
        assert claim(second, again, two) == [False, False, True]
        first.close()
        assert [is_free(place, two) for place in places] == [True, True, False]


def test_in_a_bucket_a_lease_tells_two_machines_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, url = gcs.shared(), "gs://tinypod-test/claims/machines"
    one, two = Worker(0, 2), Worker(1, 2)
    with ExitStack() as first, ExitStack() as second:
        here, there = Run(tmp_path / "here", url), Run(tmp_path / "there", url)
        store.put(f"{url}/runs/a/outcome.json", b'{"state": "waiting", "step": 20}')
        with choosing(here, one):
            assert claim(first, [run_of(here.folder, "a", url)], one) == [True]
        assert read_outcome(run_of(here.folder, "a")).step == 20  # brought here
        with choosing(there, two):
            assert not is_free(run_of(there.folder, "a", url), two)
            assert claim(second, [run_of(there.folder, n, url) for n in "ab"], two) == [False, True]
        first.close()
        assert is_free(run_of(there.folder, "a", url), two)
        # Started again after a crash the same worker needs not wait for its lease to lapse.
        second.enter_context(choosing(there, two))
        assert is_free(run_of(tmp_path / "new machine", "b", url), two)
        assert not is_free(run_of(tmp_path / "new machine", "b", url), one)


def test_what_is_claimed_is_renewed_until_it_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No heartbeat does it while a run is set up."""
    store, url = gcs.shared(), "gs://tinypod-test/claims/renewed"
    monkeypatch.setattr(claims, "LAPSE_S", 0.1)

    def renewed() -> float:
        return float(json.loads(store.files(f"{url}/runs/a")["owner.lock"])["renewed"])

    with ExitStack() as stack:
        assert claim(stack, [run_of(tmp_path, "a", url)], Worker()) == [True]
        first, deadline = renewed(), time.monotonic() + LIMIT_S
        while renewed() == first:
            assert time.monotonic() < deadline, "nobody renews it"
            time.sleep(0.02)
    assert "owner.lock" not in store.files(f"{url}/runs/a")


def write_study_file(folder: Path, data: Path, steps: int) -> Path:
    tree = configs.read_tree(CONFIGS / "trm" / "sudoku_mlp.yaml")
    for text in (*TINY, f"data.path={data}", "checkpoint.every_steps=20", f"steps={steps}", "eval.every_steps=20"):
        tree = configs.merge(tree, configs.parse_override(text))
    (folder / "base.yaml").write_text(yaml.safe_dump(tree))
    path = folder / "shared.yaml"
    path.write_text(yaml.safe_dump({"base": "base.yaml", "factors": {"model.hidden_size": [16, 32]}, "seeds": 2}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("place", "steps"), [("folder", 200), ("bucket", 80)])  # to a bucket, saving takes its time
def test_what_one_worker_leaves_another_takes(place: str, steps: int, tmp_path: Path) -> None:
    """Two workers; the one that came first is ended in the middle of its runs, and a new one comes."""
    path = write_study_file(tmp_path, write_4x4(tmp_path / "data"), steps)
    store = gcs.shared()
    url = "gs://tinypod-test/claims/story"
    target = url if place == "bucket" else str(tmp_path / "s")
    argv = [sys.executable, "-m", "tinypod", "study", "run", str(path), "--folder", target, "--workers", "2"]

    def start(number: int, cache: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / cache), "COLUMNS": "200"}
        return subprocess.Popen(
            [*argv, "--worker", str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def has_saved(name: str) -> bool:
        if place == "bucket":
            return any(f"runs/{name}/checkpoints/20/" in file for file in store.files(url))
        return (tmp_path / "s" / "runs" / name / "checkpoints" / "20").exists()

    study: Study = load_study(path)
    dearest = [run.name for run in study.runs if run.config.model.hidden_size == 32]
    first = start(1, "first")
    deadline = time.monotonic() + LIMIT_S
    while not any(has_saved(name) for name in dearest):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second = start(0, "second")
    # Killed where the kernel frees its runs at once; in a bucket that takes LAPSE_S, so there it may say good-bye.
    first.send_signal(signal.SIGTERM if place == "bucket" else signal.SIGKILL)
    first.communicate(timeout=LIMIT_S)
    said = second.communicate(timeout=LIMIT_S)[0]
    assert second.returncode == 0, said
    read = open_run(target) if place == "folder" else Run(tmp_path / "read", url)
    refresh(read)
    outcomes = {run.name: read_outcome(run_of(read.folder, run.name)) for run in study.runs}
    assert {outcome.state for outcome in outcomes.values()} == {"done"}, said
    assert all(outcome.step == steps for outcome in outcomes.values())
    assert "resuming" in said
    if place == "bucket":
        files = store.files(url)
        assert "report/report.html" in files
        assert not [name for name in files if name.endswith(".lock")], "somebody still owns something"
        assert all(f"runs/{name}/curves.png" in files for name in outcomes)
