"""A run cut into pieces is the run: it resumes elsewhere to the bit. Whatever is missing, damaged or half written is
named, and never taken for a run."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

import gcs
from fixtures import Steps, tiny_config, write_4x4
from poison import poisoned
from tinypod import cli, experiment, tasks, training
from tinypod.cluster.agreement import Cluster
from tinypod.errors import CheckpointError, DamagedError, StorageError, UserError
from tinypod.runs import listing, pieces
from tinypod.runs.checkpoints import Checkpoints
from tinypod.runs.checksums import flatten
from tinypod.runs.folder import Run, open_run
from tinypod.runs.saver import Saver
from tinypod.step import TrainState

QUIET = Console(quiet=True)
EVERY_TEN = ("eval.every_steps=10", "checkpoint.every_steps=10", "checkpoint.keep_last=9")
SMALL = "4KiB"


def train(data: Path, folder: Path, steps: int) -> None:
    training.train(tiny_config(data, f"steps={steps}", *EVERY_TEN), Run(folder), QUIET, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("pieces") / "data")


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    train(data, data.parent / "run", 20)
    return data.parent / "run"


@pytest.fixture(scope="module")
def packed(run: Path) -> Path:
    pieces.pack(Run(run), run.parent / "packed", QUIET, piece=SMALL)
    return run.parent / "packed"


@pytest.fixture
def copied(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copied"))


def state_at(data: Path, folder: Path, step: int) -> dict[str, Any]:
    built = experiment.build(tiny_config(data), jax.devices()[:1])
    checkpoints = Checkpoints(folder / "checkpoints", read_only=True)
    return flatten(jax.device_get(checkpoints.restore(step, built.abstract_state)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_twenty_steps_packed_and_twenty_more_elsewhere_are_forty_to_the_bit(
    data: Path, run: Path, copied: Path, tmp_path: Path
) -> None:
    elsewhere = Path(shutil.copytree(data, tmp_path / "elsewhere"))
    pieces.unpack(copied, tmp_path / "there" / "run", QUIET)
    train(elsewhere, tmp_path / "there" / "run", 40)
    train(data, tmp_path / "straight", 40)
    moved, straight = state_at(data, tmp_path / "there" / "run", 40), state_at(data, tmp_path / "straight", 40)
    assert moved.keys() == straight.keys()
    assert {name.split(".")[0] for name in moved} == {"step", "params", "opt_state", "ema", "carry"}
    for name in moved:
        assert moved[name].tobytes() == straight[name].tobytes(), name
    scores = [
        [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "eval/count" in row]
        for folder in (tmp_path / "there" / "run", tmp_path / "straight")
    ]
    assert [row["step"] for row in scores[0]] == [10, 20, 30, 40]
    assert [row["eval/exact_accuracy"] for row in scores[0]] == [row["eval/exact_accuracy"] for row in scores[1]]


def test_without_its_carry_every_row_begins_a_new_example(data: Path, run: Path, packed: Path, tmp_path: Path) -> None:
    """What is left is the same to the bit, and the steps that follow are those of a run that begins so."""
    out, there = tmp_path / "out", tmp_path / "there"
    manifest = pieces.pack(Run(run), out, QUIET, piece=SMALL, without_carry=True)
    assert manifest.size_bytes < pieces.read_manifest(packed).size_bytes
    assert names(out) == sorted([pieces.MANIFEST, *(piece.name for piece in manifest.pieces)])
    pieces.unpack(out, there, QUIET)
    built = experiment.build(tiny_config(data, "steps=40", *EVERY_TEN), jax.devices()[:1])
    whole = Checkpoints(run / "checkpoints", read_only=True).restore(20, built.abstract_state)
    told = Console(file=io.StringIO(), width=200)
    saver = Saver(Run(there), built, Cluster(), told, {})
    expected = whole._replace(carry=built.init().carry)
    assert_same(saver.restore(20).state, expected)
    assert "step 20 was packed without its carry: every row begins a new example" in told.file.getvalue()
    step, state = Steps(built), expected
    for _ in range(20):
        state, _ = step(state)
    train(data, there, 40)
    assert_same(Checkpoints(there / "checkpoints", read_only=True).restore(40, built.abstract_state), state)
    assert "left_out" not in Checkpoints(there / "checkpoints", read_only=True).info(40)
    with pytest.raises(CheckpointError, match=r"carry\.halted: absent in the checkpoint"):
        Checkpoints(there / "checkpoints", read_only=True).restore(20, built.abstract_state)


def assert_same(found: TrainState, expected: TrainState) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (name, new), old in zip(flatten(found).items(), flatten(expected).values(), strict=True):
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes(), name


@pytest.mark.slow
def test_a_run_rolls_back_to_a_checkpoint_without_carry(
    data: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces.pack(Run(run), tmp_path / "out", QUIET, without_carry=True)
    pieces.unpack(tmp_path / "out", tmp_path / "there", QUIET)
    monkeypatch.setitem(tasks.KINDS, "puzzle", poisoned(tasks.KINDS["puzzle"], {22, 23}))
    told = Console(file=io.StringIO(), width=200)
    config = tiny_config(data, "steps=26", *EVERY_TEN, "nonfinite.rollback_after=2", "log.every_steps=1")
    training.train(config, Run(tmp_path / "there"), told, devices=jax.devices()[:1])
    assert "to step 20, their 2 batches are left out" in " ".join(told.file.getvalue().split())
    assert told.file.getvalue().count("packed without its carry") == 2  # at the start, and then
    assert int(state_at(data, tmp_path / "there", 26)["step"]) == 26


def test_a_copy_without_carry_that_fails_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (out / f"{pieces.COPY}77").mkdir(parents=True)  # of a kill
    source = Path(shutil.copytree(run, tmp_path / "run"))
    for path in (source / "checkpoints" / "20" / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(b"")
    with pytest.raises(DamagedError, match=r"checkpoints/20"):
        pieces.pack(Run(source), out, QUIET, without_carry=True)
    assert names(out) == []
    ends_at(monkeypatch, 1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        pieces.pack(Run(run), out, QUIET, piece=SMALL, without_carry=True)
    assert names(out) == []


def test_no_file_is_larger_and_all_lie_in_one_folder(run: Path, packed: Path) -> None:
    files = list(packed.iterdir())
    assert all(path.is_file() for path in files)
    sizes = {path.name: path.stat().st_size for path in files if path.name != pieces.MANIFEST}
    assert len(sizes) > 10
    assert max(sizes.values()) == 4096
    assert [size for size in sizes.values() if size < 4096] in ([], [sizes[max(sizes)]])
    assert min(sizes) == "step_20.tar.000"


def test_the_pieces_are_a_plain_tar_without_what_stays_behind(run: Path, packed: Path, tmp_path: Path) -> None:
    """Read by another program."""
    for name in ("tensorboard/events", "logs/process_0.log", "checkpoints_set_aside/5/x", "half.1.partial"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("stays behind")
    pieces.pack(Run(run), tmp_path / "again", QUIET, piece=SMALL)
    whole = b"".join(path.read_bytes() for path in sorted((tmp_path / "again").glob("step_20.tar.*")))
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "x", "-C", str(tmp_path / "out")], input=whole, check=True)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    tops = {name.split("/")[0] for name in found}
    assert {"config.yaml", "metrics.jsonl", "task.json", "goodput.json", "checkpoints", "health"} <= tops
    assert tops.isdisjoint({"tensorboard", "logs", "checkpoints_set_aside", ".lock", "half.1.partial"})
    assert {name.split("/")[1] for name in found if name.startswith("checkpoints/")} == {"20"}
    for name in found:
        assert (tmp_path / "out" / name).read_bytes() == (run / name).read_bytes(), name


def test_names_too_long_for_a_plain_header_survive(run: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(run, tmp_path / "run"))
    long = f"notes/{'a' * 90}/{'ä' * 90}.txt"
    (source / long).parent.mkdir(parents=True)
    (source / long).write_text("kept")
    pieces.pack(Run(source), tmp_path / "packed", QUIET, piece=SMALL)
    pieces.unpack(tmp_path / "packed", tmp_path / "there", QUIET)
    assert (tmp_path / "there" / long).read_text() == "kept"


def test_the_checkpoint_is_the_one_asked_for(run: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(run, tmp_path / "run"))
    rows = [json.loads(line) for line in (source / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "eval/exact_accuracy" in row:
            row["eval/exact_accuracy"] = 0.9 if row["step"] == 10 else 0.1
    (source / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for wanted, step in (("best", 10), ("latest", 20), ("10", 10)):
        assert pieces.pack(Run(source), tmp_path / wanted, QUIET, checkpoint=wanted).step == step
    config = yaml.safe_load((source / "config.yaml").read_text())
    config["checkpoint"]["best"] = {"metric": None, "mode": "min"}
    (source / "config.yaml").write_text(yaml.safe_dump(config))
    assert pieces.pack(Run(source), tmp_path / "lowest", QUIET, checkpoint="best").step == 20
    for wanted in ("15", "newest"):
        with pytest.raises(CheckpointError, match=rf"--checkpoint {wanted}: expected .* one of \[10, 20\]"):
            pieces.pack(Run(source), tmp_path / "none", QUIET, checkpoint=wanted)
    shutil.rmtree(source / "checkpoints")
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        pieces.pack(Run(source), tmp_path / "none", QUIET)
    assert not (tmp_path / "none").exists()


def cut_short(folder: Path) -> None:
    os.truncate(folder / "step_20.tar.003", 1000)


def flip(folder: Path) -> None:
    content = bytearray((folder / "step_20.tar.003").read_bytes())
    content[17] ^= 4
    (folder / "step_20.tar.003").write_bytes(content)


def swap(folder: Path) -> None:
    (folder / "step_20.tar.003").rename(folder / "x")
    (folder / "step_20.tar.002").rename(folder / "step_20.tar.003")
    (folder / "x").rename(folder / "step_20.tar.002")


def lose(folder: Path) -> None:
    (folder / "step_20.tar.003").unlink()


@pytest.mark.parametrize(
    ("harm", "kind", "said"),
    [
        (cut_short, DamagedError, r"1 of \d+ pieces .*\n  step_20\.tar\.003: 1,000 bytes where 4,096 were written\n"),
        (flip, DamagedError, r"1 of \d+ pieces .*\n  step_20\.tar\.003: damaged"),
        (lose, CheckpointError, r"1 of \d+ pieces .*\n  step_20\.tar\.003: missing\n.*Copy these again"),
        (
            swap,
            DamagedError,
            r"2 of \d+ pieces .*\n  step_20\.tar\.002: it is step_20\.tar\.003 under another name\n"
            r"  step_20\.tar\.003: it is step_20\.tar\.002 under another name",
        ),
    ],
)
def test_a_piece_that_is_not_what_was_written_is_named_and_the_next_try_works(
    packed: Path, copied: Path, tmp_path: Path, harm: Callable[[Path], None], kind: type[UserError], said: str
) -> None:
    harm(copied)
    with pytest.raises(kind, match=said) as refused:
        pieces.unpack(copied, tmp_path / "there" / "run", QUIET)
    assert refused.value.exit_code == 2
    assert not (tmp_path / "there").exists()
    for path in packed.iterdir():  # copied again
        shutil.copy(path, copied / path.name)
    assert pieces.unpack(copied, tmp_path / "there" / "run", QUIET).step == 20
    assert names(tmp_path / "there") == ["run"]


def test_a_manifest_that_is_none_is_refused(copied: Path, tmp_path: Path) -> None:
    manifest = copied / pieces.MANIFEST
    whole = manifest.read_text()
    for content, said in (
        (whole[:-20], r"manifest\.json: not a manifest.*copy it again"),
        (whole.replace('"format": 1', '"format": 2'), r"manifest\.json: not a manifest .*format"),
        (whole.replace('"name": "step', '"name": "../step'), r"not a manifest .*pieces\.0\.name"),
    ):
        assert content != whole
        manifest.write_text(content)
        with pytest.raises(DamagedError, match=said):
            pieces.unpack(copied, tmp_path / "run", QUIET)
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json: not there.*packing was cut off"):
        pieces.unpack(copied, tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def disk_is_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("end", "kind"), [(interrupt, KeyboardInterrupt), (disk_is_full, StorageError)])
def test_what_is_cut_off_leaves_nothing_that_is_believed(
    run: Path, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[..., None], kind: Any
) -> None:
    """In the midst of a piece, at the manifest, and in the midst of the fifth file that is unpacked."""
    count = len(list(copied.glob("step_20.tar.*")))
    for after in (3, count):
        ends_at(monkeypatch, after, end)
        with pytest.raises(kind) as ended:
            pieces.pack(Run(run), tmp_path / "out", QUIET, piece=SMALL)
        assert names(tmp_path / "out") == []
    ends_at(monkeypatch, 4, end)
    with pytest.raises(kind) as ended:
        pieces.unpack(copied, tmp_path / "there" / "run", QUIET)
    if kind is StorageError:
        assert "no space left on the device" in str(ended.value)
        assert ended.value.exit_code == 75
    assert names(tmp_path / "there") == []


def ends_at(monkeypatch: pytest.MonkeyPatch, after: int, end: Callable[..., None]) -> None:
    """The file system's calls after so many files were written."""
    monkeypatch.undo()
    written, fsync = 0, os.fsync

    def count(number: int) -> None:
        nonlocal written
        written += 1
        return end() if written > after else fsync(number)

    monkeypatch.setattr(os, "fsync", count)


def test_what_a_kill_left_is_cleared_away(run: Path, copied: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("step_10.tar.000", "step_10.tar.001.77.partial", "manifest.json.77.partial"):
        (out / name).write_text("half")
    pieces.pack(Run(run), out, QUIET, piece=SMALL)
    assert names(out) == names(copied)
    unfinished = tmp_path / "runs" / ".run.unpacking"
    shutil.copytree(run, unfinished)
    (unfinished / "left_behind").write_text("half")
    assert listing.list_runs(str(tmp_path / "runs"), 0.0) == []
    pieces.unpack(out, tmp_path / "runs" / "run", QUIET)
    assert names(tmp_path / "runs") == ["run"]
    assert not (tmp_path / "runs" / "run" / "left_behind").exists()


def test_nothing_is_overwritten(run: Path, copied: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds a packed run already"):
        pieces.pack(Run(run), copied, QUIET)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "step_3.tar.000").write_text("another's")
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty \(thesis\.txt\)"):
        pieces.pack(Run(run), tmp_path / "full", QUIET)
    with pytest.raises(UserError, match="is inside the run folder, and would be packed with it"):
        pieces.pack(Run(run), run / "pieces", QUIET)
    with pytest.raises(UserError, match="is a file"):
        pieces.pack(Run(run), tmp_path / "full" / "thesis.txt", QUIET)
    with pytest.raises(UserError, match="exists already; choose another"):
        pieces.unpack(copied, tmp_path / "full", QUIET)
    assert names(tmp_path / "full") == ["step_3.tar.000", "thesis.txt"]
    (tmp_path / "empty").mkdir()
    pieces.unpack(copied, tmp_path / "empty", QUIET)
    assert (tmp_path / "empty" / "config.yaml").exists()


def test_two_that_unpack_into_one_folder_publish_nothing_half(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one clears away what this one has written so far."""
    copy, calls = shutil.copyfileobj, []

    def copy_and_lose(source: Any, target: Any, length: int) -> None:
        copy(source, target, length)
        calls.append(target.name)
        if len(calls) == 2:
            Path(calls[0]).unlink()

    monkeypatch.setattr(pieces.shutil, "copyfileobj", copy_and_lose)
    with pytest.raises(StorageError, match=r"gone while the run was unpacked; is another .* under way"):
        pieces.unpack(copied, tmp_path / "runs" / "run", QUIET)
    assert names(tmp_path / "runs") == []


def test_a_tar_that_leads_out_of_the_run_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = pieces._header
    monkeypatch.setattr(pieces, "_header", lambda member: header(member._replace(name=f"../{member.name}")))
    pieces.pack(Run(run), tmp_path / "packed", QUIET)
    with pytest.raises(UserError, match="it leads out of it"):
        pieces.unpack(tmp_path / "packed", tmp_path / "there" / "run", QUIET)
    assert names(tmp_path / "there") == []


@pytest.mark.parametrize("before", ["_make_ready", "_small_files"])
def test_a_checkpoint_that_is_removed_meanwhile_is_told_apart(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Before its files are listed, and before they are read."""
    source, works = Path(shutil.copytree(run, tmp_path / "run")), getattr(pieces, before)

    def remove_and_work(argument: Any) -> Any:
        shutil.rmtree(source / "checkpoints" / "20")
        return works(argument)

    monkeypatch.setattr(pieces, before, remove_and_work)
    with pytest.raises(StorageError, match=r"checkpoints/20: the run removed this checkpoint meanwhile; start again"):
        pieces.pack(Run(source), tmp_path / "out", QUIET)
    assert names(tmp_path / "out") == []


def test_a_run_in_a_bucket_is_packed(
    data: Path, run: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url, store = "gs://tinypod-test/pieces/run", gcs.shared()
    for path in run.rglob("*"):
        if path.is_file() and not path.match("checkpoints/20/commit_success.txt"):  # that one is not complete
            store.put(f"{url}/{path.relative_to(run)}", path.read_bytes())
    assert pieces.pack(open_run(url), tmp_path / "out", QUIET, piece=SMALL).step == 10
    pieces.unpack(tmp_path / "out", tmp_path / "run", QUIET)
    found, expected = (state_at(data, folder, 10) for folder in (tmp_path / "run", run))
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    for target in (pieces.pack, pieces.unpack):
        with pytest.raises(UserError, match="local folder; name one"):
            target(open_run(run) if target is pieces.pack else packed, Path("gs://tinypod-test/x"), QUIET)


def test_the_commands_say_what_they_do(run: Path, packed: Path, tmp_path: Path) -> None:
    def said(*arguments: object) -> str:
        result = CliRunner().invoke(cli.app, ["runs", *map(str, arguments)])
        assert result.exit_code == 0, (result.output, result.exception)
        return " ".join(result.output.split())

    count = len(list(packed.glob("step_20.tar.*")))
    text = said("pack", run, tmp_path / "out", "--piece", "4096")
    assert f"in {count} pieces of up to 4.0 KiB" in text
    assert f"wrote {count} pieces and manifest.json" in text
    assert text.index("pieces of up to") < text.index("wrote")
    smaller = said("pack", run, tmp_path / "smaller", "--piece", "4096", "--without-carry")
    assert int(re.search(r"wrote (\d+) pieces", smaller)[1]) < count
    text = said("unpack", tmp_path / "out", tmp_path / "there")
    assert f"the run run as of step 20. Resume it with `tinypod train {tmp_path / 'there'}`" in text


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("16MiB", 1 << 24), ("16 mib", 1 << 24), ("500KB", 500_000), ("1.5M", 3 << 19), ("1G", 1 << 30)],
)
def test_sizes_as_people_write_them(text: str, size_bytes: int) -> None:
    assert pieces.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "16TiB", "-1MiB", "16MiB!", "12", "2GiB", "0"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--piece .*: expected"):
        pieces.parse_size(text)
