"""What is saved comes back to the bit; what is damaged or foreign is refused, named, and left alone."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from fixtures import tiny_config, write_4x4
from tinypod import experiment
from tinypod.checkpoint import SET_ASIDE, Checkpoints, flatten
from tinypod.errors import CheckpointError
from tinypod.step import TrainState


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> experiment.Experiment:
    data = write_4x4(tmp_path_factory.mktemp("checkpoint") / "data")
    return experiment.build(tiny_config(data), jax.devices()[:2])


@pytest.fixture(scope="module")
def state(built: experiment.Experiment) -> TrainState:
    state, _ = built.train_step(built.init(), built.put_source(built.read_split("train")))
    return state


def at(state: TrainState, step: int) -> TrainState:
    return state._replace(step=jax.device_put(np.int32(step), state.step.sharding))


def saved(folder: Path, state: TrainState, steps: dict[int, float | None], **options) -> Checkpoints:
    checkpoints = Checkpoints(folder, **({"keep_last": 9, "best_metric": "eval/x"} | options))
    for step, metric in steps.items():
        checkpoints.save(at(state, step), {"a": step}, None if metric is None else {"eval/x": metric})
    checkpoints.wait()
    return checkpoints


def tree_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_state_comes_back_to_the_bit_with_its_shardings(built, state, tmp_path: Path) -> None:
    saved(tmp_path / "c", state, {3: None}).close()
    again = Checkpoints(tmp_path / "c", read_only=True)
    restored = again.restore(3, built.abstract_state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for (name, new), old in zip(flatten(restored).items(), jax.tree.leaves(at(state, 3)), strict=True):
        assert new.dtype == old.dtype, name
        assert np.array_equal(new, old), name
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim), name
    assert again.info(3)["a"] == 3


def test_the_last_and_the_best_are_kept(state, tmp_path: Path) -> None:
    metrics = {1: 0.1, 2: 0.9, 3: 0.3, 4: None, 5: 0.9, 6: 0.2, 7: None, 8: None}
    checkpoints = saved(tmp_path / "c", state, metrics, keep_last=2)
    assert checkpoints.steps() == [5, 7, 8]
    assert checkpoints.best() == (5, 0.9)
    checkpoints.close()
    again = Checkpoints(tmp_path / "c", keep_last=2, best_metric="eval/x")  # a new start knows it, too
    assert again.best() == (5, 0.9)
    again.save(at(state, 9), {})
    again.wait()
    assert again.steps() == [5, 8, 9]
    lowest = saved(tmp_path / "d", state, {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0}, keep_last=1, best_mode="min")
    assert lowest.steps() == [2, 4]
    assert lowest.best() == (2, 1.0)


def state_files(folder: Path) -> list[Path]:
    return sorted((p for p in (folder / "state").rglob("*") if p.is_file()), key=lambda p: -p.stat().st_size)


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "metadata", "info", "empty"])
def test_a_damaged_checkpoint_is_refused_and_left_alone(built, state, tmp_path: Path, damage: str) -> None:
    saved(tmp_path / "c", state, {3: None, 6: None}).close()
    folder = tmp_path / "c" / "6"
    victim = state_files(folder)[0]
    content = victim.read_bytes()
    if damage == "cut":
        victim.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        middle = len(content) // 2
        victim.write_bytes(content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :])
    elif damage == "gone":
        victim.unlink()
    elif damage == "metadata":
        (folder / "state" / "_METADATA").write_text("{")
    elif damage == "info":
        shutil.rmtree(folder / "info")
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    before = tree_of(tmp_path / "c")
    checkpoints = Checkpoints(tmp_path / "c", keep_last=9)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(6, built.abstract_state)
    message = str(caught.value)
    assert f"{folder} is damaged" in message
    assert "--from-step 3" in message
    assert tree_of(tmp_path / "c") == before
    assert int(checkpoints.restore(3, built.abstract_state).step) == 3


def test_the_first_of_all_has_none_before_it(built, state, tmp_path: Path) -> None:
    saved(tmp_path / "c", state, {6: None}).close()
    state_files(tmp_path / "c" / "6")[0].write_bytes(b"")
    with pytest.raises(CheckpointError, match="there is none before it"):
        Checkpoints(tmp_path / "c").restore(6, built.abstract_state)


def test_another_model_is_refused_with_what_differs(built, state, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "c", state, {3: None})
    data = built.config.data.path
    wider = experiment.build(tiny_config(Path(data), "model.hidden_size=32"), jax.devices()[:2])
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(3, wider.abstract_state)
    assert "params.head: float32[16, 6] in the checkpoint, float32[32, 6] in this config" in str(caught.value)
    no_table = experiment.build(tiny_config(Path(data), "model.puzzle_embedding={kind: none}"), jax.devices()[:2])
    with pytest.raises(CheckpointError, match=r"params.puzzle_table: float32\[1, 8\] in the checkpoint, absent in"):
        checkpoints.restore(3, no_table.abstract_state)
    assert checkpoints.steps() == [3]


def test_newer_checkpoints_are_set_aside_not_deleted(built, state, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "c", state, {3: None, 6: None, 9: None})
    nine = tree_of(tmp_path / "c" / "9")
    moved = checkpoints.set_aside_after(3)
    assert [p.name for p in moved] == ["6", "9"]
    assert checkpoints.steps() == [3]
    assert tree_of(tmp_path / SET_ASIDE / "9") == nine
    checkpoints.save(at(state, 6), {})
    checkpoints.wait()
    assert [p.name for p in checkpoints.set_aside_after(3)] == ["6.1"]
    with pytest.raises(CheckpointError, match="no checkpoint of step 4; there are: 3"):
        checkpoints.set_aside_after(4)


def test_a_full_disk_is_told(state, tmp_path: Path) -> None:
    """A file where the folder should be: the write fails as it would on a full or read-only disk."""
    checkpoints = saved(tmp_path / "c", state, {3: None})
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "c").write_text("")

    def save() -> None:
        checkpoints.save(at(state, 6), {})
        checkpoints.wait()

    with pytest.raises(CheckpointError, match="saving a checkpoint failed"):
        save()
