"""What the loop does when something around it goes wrong: disks, memory, compilers, checkpoints."""

import errno
import os
import resource
import shutil
import signal
from io import StringIO
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

from fixtures import tiny_config, write_4x4
from test_training import assert_same_states, in_a_process, rows, state_at
from tinypod import training
from tinypod.errors import CheckpointError, CorruptionError, RecompileError, StorageError
from tinypod.health import goodput
from tinypod.health.heartbeat import read_heartbeats
from tinypod.runs import rows as training_rows
from tinypod.runs import saver
from tinypod.runs.folder import Run

STEPS = ("steps=8", "checkpoint.every_steps=2", "eval.every_steps=null", "log.every_steps=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("loop") / "data")


def trained(data: Path, folder: Path, *overrides: str, **options) -> str:
    console = Console(file=StringIO(), width=300)
    training.train(tiny_config(data, *STEPS, *overrides), Run(folder), console, **options)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    trained(data, folder)
    return folder


def limit_files_to(size_bytes: int) -> None:
    """Writes beyond it fail for real, as on a full disk."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))


def test_a_disk_that_is_full_for_a_while_costs_nothing(
    data: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full at the save of step 4 and its rows of metrics, free again from step 6 on."""
    save, progress = saver.Saver.save, training.TrainingProgress.step

    def filling(self, state, step, *rest):
        if step == 4:
            limit_files_to(500)
        save(self, state, step, *rest)

    def freeing(self, step):
        if step == 7:
            limit_files_to(resource.RLIM_INFINITY)
        progress(self, step)

    monkeypatch.setattr(saver.Saver, "save", filling)
    monkeypatch.setattr(training.TrainingProgress, "step", freeing)
    monkeypatch.setattr(saver, "RETRY_SAVE_S", 0.0)
    try:
        output = trained(data, tmp_path / "run")
    finally:
        limit_files_to(resource.RLIM_INFINITY)
    assert "Training continues" in output
    assert [row["step"] for row in rows(tmp_path / "run") if "train/loss" in row] == list(range(1, 9))
    assert_same_states(*(state_at(data, folder, 8) for folder in (straight, tmp_path / "run")))
    assert "4" not in {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}


def test_a_disk_that_stays_full_ends_the_run_with_its_own_code(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "GIVE_UP_SAVING_S", 2.0)
    start = saver.Saver._start

    def full(self, state, step, *rest):
        if step == 8:
            self.checkpoints.wait()
            limit_files_to(500)
        start(self, state, step, *rest)

    monkeypatch.setattr(saver.Saver, "_start", full)
    try:
        with pytest.raises(StorageError, match="the latest complete one is step 6") as caught:
            trained(data, tmp_path / "run")
    finally:
        limit_files_to(resource.RLIM_INFINITY)
    assert caught.value.exit_code == 75
    assert "8" not in {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    monkeypatch.undo()
    trained(data, tmp_path / "run")  # with room, the same command goes on


def test_under_supervision_a_damaged_checkpoint_is_set_aside(
    data: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(straight, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "8")
    monkeypatch.setenv(saver.SUPERVISED, "1")
    output = trained(data, tmp_path / "run")
    assert "is damaged" in output
    assert "resuming from the checkpoint of step 6" in output
    assert (tmp_path / "run" / "checkpoints_set_aside" / "8").is_dir()
    assert_same_states(*(state_at(data, folder, 8) for folder in (straight, tmp_path / "run")))
    assert goodput.summarise(tmp_path / "run").lost_steps == 2


def test_under_supervision_a_run_without_a_sound_checkpoint_begins_again(
    data: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(straight, tmp_path / "run")
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        damage(checkpoint)
    monkeypatch.setenv(saver.SUPERVISED, "1")
    assert "steps 0 to 8" in trained(data, tmp_path / "run")
    assert_same_states(*(state_at(data, folder, 8) for folder in (straight, tmp_path / "run")))


def test_a_run_with_imported_weights_does_not_begin_again_with_others(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "imported.json").write_text("{}")
    with pytest.raises(CheckpointError, match="began with imported weights"):
        trained(data, tmp_path / "run")


def damage(folder: Path) -> None:
    for path in (folder / "state").rglob("*"):
        if path.is_file() and path.stat().st_size > 5000:
            path.write_bytes(path.read_bytes()[:1000])


def test_a_read_that_the_system_refuses_condemns_no_checkpoint(
    data: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(straight, tmp_path / "run")
    monkeypatch.setenv(saver.SUPERVISED, "1")

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ocp.CheckpointManager, "restore", refused)
    with pytest.raises(StorageError, match="cannot be read now"):
        trained(data, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints_set_aside").exists()


def test_an_evaluation_that_a_stop_cut_off_at_the_end_is_made_up_for(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = training.Evaluator.__call__

    def interrupted(self, params, progress=None):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, params, progress)

    with monkeypatch.context() as patched:
        patched.setattr(training.Evaluator, "__call__", interrupted)
        trained(data, tmp_path / "run")
    assert not any("eval/count" in row for row in rows(tmp_path / "run"))
    for _ in range(2):  # once, not twice
        trained(data, tmp_path / "run")
        assert [row["step"] for row in rows(tmp_path / "run") if "eval/count" in row] == [8]


def test_the_host_is_never_far_ahead_of_the_device(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where there is nothing to log for long."""
    fetched, ahead = [], []
    original, beat = training_rows.Rows._fetch, training.Health.beat

    def beating(self, step=None):
        if step:
            ahead.append(step - len(fetched))
        beat(self, step)

    monkeypatch.setattr(training_rows.Rows, "_fetch", lambda self: fetched.append(1) or original(self))
    monkeypatch.setattr(training.Health, "beat", beating)
    trained(data, tmp_path / "run", "log.every_steps=8", "checkpoint.every_steps=null")
    assert max(ahead) == training_rows.QUEUED


def recompiling(monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
    function = jax.jit(lambda x: x + 1)
    original = training.training_record

    steps = []

    def row(experiment, parts, seconds):
        steps.extend(parts)
        function(np.zeros(3 if len(steps) < at_step else 4, np.float32))
        return original(experiment, parts, seconds)

    function(np.zeros(3, np.float32))

    monkeypatch.setattr(training, "training_record", row)


def test_a_compile_after_warm_up_stops_the_run_and_says_what_changed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recompiling(monkeypatch, at_step=5)
    with pytest.raises(RecompileError, match=r"jit\(<lambda>\) was compiled after warm-up"):
        trained(data, tmp_path / "run")
    # The row of step 5 is written when step 6 is under way. What was trained is sound.
    assert read_heartbeats(tmp_path / "run" / "health")[0].step == 6
    assert (tmp_path / "run" / "checkpoints" / "6").is_dir()
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_compile_after_warm_up_can_be_let_through(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recompiling(monkeypatch, at_step=5)
    output = trained(data, tmp_path / "run", "health.on_recompile=warn")
    assert "was compiled" in output
    assert rows(tmp_path / "run")[-1]["step"] == 8


def test_weights_that_differ_between_replicas_stop_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = training._compile

    def corrupting(*args):
        train_step, check_replicas = original(*args)

        def step(state, *inputs):
            state, sums = train_step(state, *inputs)
            if int(state.step) == 5:
                head = state.params["head"]
                copies = [np.array(shard.data) for shard in head.addressable_shards]
                copies[3][0, 0] += 1
                parts = [jax.device_put(x, s.device) for x, s in zip(copies, head.addressable_shards, strict=True)]
                wrong = jax.make_array_from_single_device_arrays(head.shape, head.sharding, parts)
                state = state._replace(params=state.params | {"head": wrong})
            return state, sums

        return step, check_replicas

    trained(data, tmp_path / "healthy", "health.replica_check_every_steps=2")
    monkeypatch.setattr(training, "_compile", corrupting)
    with pytest.raises(CorruptionError, match="head"):
        trained(data, tmp_path / "run", "health.replica_check_every_steps=2")
    assert read_heartbeats(tmp_path / "run" / "health")[0].step == 6


def test_steps_can_be_profiled(data: Path, tmp_path: Path) -> None:
    trained(data, tmp_path / "run", profile=(3, 4))
    traces = list((tmp_path / "run" / "profile" / "process_0").rglob("*.xplane.pb"))
    assert len(traces) == 1
    assert traces[0].stat().st_size > 1000


@pytest.mark.slow
def test_what_was_compiled_serves_the_next_start(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, in the user's cache folder; two processes, one after the other."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # one device: eight take minutes when busy
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # keep all, however fast or busy it is
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for steps in (2, 3):
        done = in_a_process(data, tmp_path / "run", f"steps={steps}")
        assert done.returncode == 0, done.stderr
    assert list((tmp_path / "cache" / "tinypod" / "compiled").iterdir())
    first, second = goodput.read_attempts(tmp_path / "run")
    assert first.cache_hits < first.cache_misses
    assert second.cache_hits > second.cache_misses
