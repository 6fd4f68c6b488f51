"""Which runs `runs list` finds, what it says of each, and that it fits."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import gcs
from tinypod.errors import UserError
from tinypod.health.heartbeat import Heartbeat, write_heartbeat
from tinypod.runs.folder import Run, lock
from tinypod.runs.listing import Entry, as_json, list_runs, render
from tinypod.runs.metrics import MetricsLog

NOW = 1_000_000.0
EXACT = {"name": "exact_accuracy", "label": "exact", "direction": "max", "format": ".2%"}
PERPLEXITY = {"name": "perplexity", "label": "perplexity", "direction": "min", "format": ".2f"}


def make(
    folder: Path, *, scores=(), age: float = 60.0, ended: str | None = "done", steps: int = 65_104, **more
) -> Path:
    """A run folder as training leaves it; `ended=None`: without heartbeats."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"steps: {steps}\ntask: {{kind: puzzle}}\n")
    metric = more.pop("metric", EXACT)
    (folder / "task.json").write_text(json.dumps({"headline": [metric], "num_weights": 5}))
    for step, score in scores:
        record = {"step": step, "time": NOW - age, f"eval/{metric['name']}": score}
        MetricsLog(folder).append(record)
    if ended is not None:
        (folder / "health").mkdir()
        values = {"count": 1, "host": "elsewhere", "pid": 1, "step": scores[-1][0] if scores else 0, "time": NOW - age}
        values |= {"ended": ended or None} | more
        write_heartbeat(folder / "health", Heartbeat(process=0, **values))
    return folder


def shown(entries: list[Entry], width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(render(entries, NOW, width))
    return captured.get().splitlines()


def states(folder: Path) -> dict[str, tuple[str, str | None]]:
    return {entry.name: (entry.state, entry.reason) for entry in list_runs(str(folder), NOW)}


def test_each_run_is_a_row_newest_first(tmp_path: Path) -> None:
    make(tmp_path / "old", scores=[(10, 0.5), (20, 0.25)], age=7200, steps=20)
    make(tmp_path / "new", scores=[(10, 0.75)], age=30)
    rows = shown(list_runs(str(tmp_path), NOW), 80)
    assert rows[0] == "2 runs: 2 done"
    assert rows[1].split() == ["run", "state", "step", "exact", "best", "age"]
    assert rows[2].split() == ["new", "done", "10/65,104", "75.00%", "75.00%", "30", "s"]
    assert rows[3].split() == ["old", "done", "20/20", "25.00%", "50.00%", "2.0", "h"]


def test_the_best_is_by_the_metric_s_own_direction(tmp_path: Path) -> None:
    make(tmp_path / "a", scores=[(10, 40.0), (20, 8.0), (30, 12.0), (40, float("nan"))], metric=PERPLEXITY)
    (entry,) = list_runs(str(tmp_path), NOW)
    assert (entry.final, entry.best, entry.best_step) == (12.0, 8.0, 20)


def test_states(tmp_path: Path) -> None:
    here = {"host": socket.gethostname()}
    with subprocess.Popen(["true"]) as process:
        gone = process.pid
    make(tmp_path / "running", ended="", age=1.0)
    make(tmp_path / "silent", ended="", age=900.0)
    make(tmp_path / "killed", ended="", age=1.0, pid=gone, **here)
    make(tmp_path / "stopped", ended="stopped: SIGTERM")
    make(tmp_path / "failed", ended="failed: no memory")
    make(tmp_path / "new", ended=None)
    make(tmp_path / "imported", ended=None)
    (tmp_path / "imported" / "imported.json").write_text("{}")
    found = states(tmp_path)
    assert {name: state for name, (state, _) in found.items()} == {
        "running": "running",
        "silent": "silent",
        "killed": "crashed",
        "stopped": "stopped",
        "failed": "failed",
        "new": "new",
        "imported": "imported",
    }
    assert found["failed"][1] == "no memory"
    assert "is gone" in str(found["killed"][1])


def test_a_lock_that_is_held_means_running(tmp_path: Path) -> None:
    make(tmp_path / "a", ended=None, scores=[(10, 0.5)])
    assert states(tmp_path) == {"a": ("stopped", None)}
    with lock(Run(tmp_path / "a")):
        assert states(tmp_path) == {"a": ("running", None)}
    assert states(tmp_path) == {"a": ("stopped", None)}


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ({"state": "done", "step": 10}, "done"),
        ({"state": "stopped_early", "reason": "behind", "step": 10}, "early"),
        ({"state": "diverged", "reason": "nan", "step": 10}, "diverged"),
        ({"state": "waiting", "step": 0}, "waiting"),
        ({"state": "waiting", "step": 10}, "stopped"),
        ({"state": "running", "step": 10}, "crashed"),
    ],
)
def test_runs_of_studies_are_found_and_have_their_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: dict, state: str
) -> None:
    study = tmp_path / "studies" / "rates"
    run = make(study / "runs" / "seed=0", ended=None)
    (run / "outcome.json").write_text(json.dumps(outcome))
    (study / "study.json").write_text("{}")
    (study / "health").mkdir()  # the study's own: it is no run
    make(tmp_path / "runs" / "alone")
    assert states(study) == {"runs/seed=0": (state, outcome.get("reason"))}
    monkeypatch.chdir(tmp_path)
    assert {entry.path for entry in list_runs(None, NOW)} == {"runs/alone", "studies/rates/runs/seed=0"}


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.yaml", "steps: [", "not readable as YAML"),
        ("config.yaml", "- 1", "expected a mapping"),
        ("metrics.jsonl", '{"step": "x"}\n', "not a record of metrics"),
        ("task.json", "{", "not what a run says about itself"),
        ("outcome.json", "{", "not JSON"),
        ("health/process_0.json", "{", "its heartbeat cannot be read"),
    ],
)
def test_what_is_damaged_is_a_row_with_the_reason(tmp_path: Path, file: str, content: str, reason: str) -> None:
    make(tmp_path / "good", scores=[(10, 0.5)])
    (make(tmp_path / "bad") / file).write_text(content)
    found = states(tmp_path)
    assert found["good"] == ("done", None)
    assert found["bad"][0] == "damaged"
    assert reason in str(found["bad"][1])
    text = " ".join(shown(list_runs(str(tmp_path), NOW), 400))
    assert f"bad damaged: {found['bad'][1]}" in text


def test_checkpoints_alone_are_a_damaged_run_and_other_folders_are_none(tmp_path: Path) -> None:
    (tmp_path / "half" / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("")
    found = states(tmp_path)
    assert list(found) == ["half"]
    assert "it has no config.yaml" in str(found["half"][1])


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("kinds", [1, 2])
def test_it_fits_and_long_names_lose_their_middle(tmp_path: Path, width: int, kinds: int) -> None:
    long = "a_long_name_that_begins_like_others_and_ends_in_what_tells_it_apart_lr=0.0001_seed="
    for seed in range(2):
        make(tmp_path / f"{long}{seed}", scores=[(65_104, 0.98765)], age=100_000)
    if kinds == 2:
        make(tmp_path / "other", scores=[(65_104, 12.34)], metric=PERPLEXITY)
    rows = shown(list_runs(str(tmp_path), NOW), width)
    assert max(map(len, rows)) <= width
    assert len(rows) == 2 + 2 + (kinds - 1)
    for seed in range(2):
        (row,) = [row for row in rows if row.startswith("a_") and row.split()[0].endswith(f"={seed}")]
        assert "…" in row.split()[0]
        assert "98.77%" in row
        assert "65,104" in row


def test_for_programs(tmp_path: Path) -> None:
    make(tmp_path / "a", scores=[(10, 0.5)], age=60.0)
    (told,) = json.loads(json.dumps(as_json(list_runs(str(tmp_path), NOW), NOW)))
    assert told == {
        "name": "a",
        "path": str(tmp_path / "a"),
        "state": "done",
        "reason": None,
        "task": "puzzle",
        "step": 10,
        "steps": 65_104,
        "metric": "eval/exact_accuracy",
        "final": 0.5,
        "best": 0.5,
        "best_step": 10,
        "active": NOW - 60,
        "age_s": 60.0,
    }


def test_a_run_of_an_older_version_has_no_score_and_is_listed(tmp_path: Path) -> None:
    (make(tmp_path / "a", scores=[(10, 0.5)]) / "task.json").unlink()
    (entry,) = list_runs(str(tmp_path), NOW)
    assert (entry.state, entry.step, entry.final) == ("done", 10, None)
    assert shown([entry], 60)[2].split() == ["a", "done", "10/65,104", "1", "min"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nope is not a folder"):
        list_runs(str(tmp_path / "nope"), NOW)
    gcs.shared()
    with pytest.raises(UserError, match=r"gs://tinypod-test/nope is not a folder"):
        list_runs("gs://tinypod-test/nope", NOW)


def test_runs_in_a_bucket_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = "gs://tinypod-test/listing/runs"
    gcs.shared().put(f"{url}/study/study.json", b"{}")
    for name, score in (("a", 0.5), ("study/runs/b", 0.75)):
        run = make(tmp_path / name, scores=[(10, score)])
        for path in run.rglob("*"):
            if path.is_file():
                gcs.shared().put(f"{url}/{name}/{path.relative_to(run)}", path.read_bytes())
    entries = {entry.name: entry for entry in list_runs(url, NOW)}
    assert {name: (entry.path, entry.state, entry.final) for name, entry in entries.items()} == {
        "a": (f"{url}/a", "done", 0.5),
        "study/runs/b": (f"{url}/study/runs/b", "done", 0.75),
    }


def test_nothing_waits_for_jax(tmp_path: Path) -> None:
    """The command itself, in a pipe: no colour, 80 columns; and comparing, which draws."""
    for name in ("a", "b"):
        make(tmp_path / "runs" / name, scores=[(10, 0.5)])
    program = (
        "import sys; sys.argv[0] = 'tinypod'\n"
        "from tinypod import cli\n"
        "cli.app(standalone_mode=False)\n"
        "assert not {'jax', 'tinypod.tasks'} & {*sys.modules}\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    for command in (["list"], ["list", "--json"], ["compare", "runs/a", "runs/b"]):
        arguments = [sys.executable, "-c", program, "runs", *command]
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        assert "runs/a" in done.stdout
    assert (tmp_path / "compare.png").exists()
