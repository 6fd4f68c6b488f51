"""What is saved comes back to the bit; what is damaged or foreign is refused, named, and left alone."""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import CheckpointManager
from orbax.checkpoint._src.handlers import base_pytree_checkpoint_handler

import gcs
from fixtures import TESTS, tiny_config, write_4x4
from tinypod import experiment
from tinypod.errors import CheckpointError, StorageError, UserError
from tinypod.runs import checksums as checksums_module
from tinypod.runs import failures, storage
from tinypod.runs.checkpoints import Checkpoints
from tinypod.runs.checksums import checksums, flatten, make_checksums
from tinypod.runs.failures import VanishedError
from tinypod.runs.set_aside import SET_ASIDE
from tinypod.runs.storage import MARKER
from tinypod.step import TrainState

IMPORTS = f"{TESTS}:{Path(__file__).parent}"  # where a process started here finds this file and what it imports


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> experiment.Experiment:
    data = write_4x4(tmp_path_factory.mktemp("checkpoint") / "data")
    return experiment.build(tiny_config(data), jax.devices()[:2])


@pytest.fixture(scope="module")
def state(built: experiment.Experiment) -> TrainState:
    feed = built.task.open_feed(built.mesh)
    state, _ = built.train_step(built.init(), built.put_settings(), built.put(np.int32(0)), feed(0))
    return state


def at(state: TrainState, step: int) -> TrainState:
    return state._replace(step=jax.device_put(np.int32(step), state.step.sharding))


def saved(folder: Path | str, state: TrainState, steps: Sequence[int], **options) -> Checkpoints:
    checkpoints = Checkpoints(folder, **({"keep_last": 9} | options))
    for step in steps:
        checkpoints.save(at(state, step), {"a": step})
    checkpoints.wait()
    return checkpoints


def tree_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_state_comes_back_to_the_bit_with_its_shardings(built, state, tmp_path: Path) -> None:
    saved(tmp_path / "c", state, [3]).close()
    again = Checkpoints(tmp_path / "c", read_only=True)
    restored = again.restore(3, built.abstract_state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for (name, new), old in zip(flatten(restored).items(), jax.tree.leaves(at(state, 3)), strict=True):
        assert new.dtype == old.dtype, name
        assert np.array_equal(new, old), name
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim), name
    assert again.info(3)["a"] == 3


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    scores = {1: 0.1, 2: 0.9, 3: 0.3, 5: 0.9, 6: 0.2}
    checkpoints = Checkpoints(tmp_path / "c", keep_last=2, score_of=scores.get)
    for step in range(1, 9):
        save_and_wait(checkpoints, step)
    assert checkpoints.steps() == [5, 7, 8]  # of equals the later one
    assert checkpoints.best() == (5, 0.9)
    checkpoints.close()
    again = Checkpoints(tmp_path / "c", keep_last=2, score_of=scores.get)  # a new start knows it, too
    assert again.best() == (5, 0.9)
    save_and_wait(again, 9)
    assert again.steps() == [5, 8, 9]
    again.close()
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan}
    lowest = Checkpoints(tmp_path / "d", keep_last=1, score_of=losses.get, best_mode="min")
    for step in losses:
        save_and_wait(lowest, step)
    assert lowest.steps() == [2, 4]
    assert lowest.best() == (2, 1.0)
    assert Checkpoints(tmp_path / "d", read_only=True).best() is None


def test_a_score_that_comes_after_its_checkpoint_counts(tmp_path: Path) -> None:
    scores = {3: 0.5}
    checkpoints = Checkpoints(tmp_path / "c", keep_last=1, score_of=scores.get)
    save_and_wait(checkpoints, 3)
    save_and_wait(checkpoints, 6)
    assert checkpoints.best() == (3, 0.5)
    scores[6] = 0.7
    assert checkpoints.best() == (6, 0.7)
    save_and_wait(checkpoints, 9)
    assert checkpoints.steps() == [6, 9]


def test_scores_that_cannot_be_read_stop_the_save_and_remove_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep_last=1, score_of=lambda step: 1 / 0 if step == 6 else None)
    save_and_wait(checkpoints, 3)
    with pytest.raises(StorageError, match="saving a checkpoint failed: division by zero"):
        save_and_wait(checkpoints, 6)
    assert 3 in checkpoints.steps()


def weights_of(abstract_state: TrainState) -> dict[str, Any]:
    return {"params": abstract_state.params, "ema": abstract_state.ema}


def test_weights_come_back_alone_from_a_state_of_another_carry_on_another_mesh(built, state, tmp_path: Path) -> None:
    saved(tmp_path / "c", state, [3]).close()
    data = Path(built.config.data.path)
    other = experiment.build(tiny_config(data, "model.dtype=bfloat16", "batch_size=8"), jax.devices()[:4])
    checkpoints = Checkpoints(tmp_path / "c", read_only=True)
    with pytest.raises(CheckpointError, match=r"carry.*in the checkpoint"):
        checkpoints.restore(3, other.abstract_state)
    restored = checkpoints.restore(3, weights_of(other.abstract_state))
    assert_same(restored, jax.device_put(weights_of(state), weights_of(other.state_shardings)))
    table = {"params": {"puzzle_table": other.abstract_state.params["puzzle_table"]}}
    assert jax.tree.structure(checkpoints.restore(3, table)) == jax.tree.structure(table)
    shutil.rmtree(tmp_path / "c" / "3" / "info")  # not needed
    assert_same(checkpoints.restore(3, weights_of(built.abstract_state)), weights_of(state))


def test_weights_of_another_model_are_refused_as_a_state_is(built, state, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "c", state, [3])
    data = Path(built.config.data.path)
    wider = experiment.build(tiny_config(data, "model.hidden_size=32"), jax.devices()[:2])
    with pytest.raises(CheckpointError, match="is of another model or state") as caught:
        checkpoints.restore(3, weights_of(wider.abstract_state))
    assert "params.head: float32[16, 6] in the checkpoint, float32[32, 6] in this config" in str(caught.value)
    assert "carry" not in str(caught.value)
    extra = {"params": {"more": built.abstract_state.params["head"]}}
    with pytest.raises(
        CheckpointError, match=r"params.more: absent in the checkpoint, float32\[16, 6\] in this config"
    ):
        checkpoints.restore(3, extra)


def bytes_read() -> int:
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def test_a_part_is_read_alone_and_checked_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 1_000_000, np.uint8)
    state = made_up(3)._replace(carry={"noise": jax.device_put(noise, made_up(3).step.sharding)})
    checkpoints = Checkpoints(tmp_path / "c")
    with monkeypatch.context() as patch:  # a checkpoint with a wrong checksum of one leaf
        wrong = state.params["w"] + 1
        patch.setattr(checkpoints, "_checksums", lambda flat: checksums(flat | {"params.w": wrong}))
        checkpoints.save(state, {})
        checkpoints.wait()
    before = bytes_read()
    sound = {"params": {name: x for name, x in state.params.items() if name != "w"}}
    assert_same(checkpoints.restore(3, abstract(sound)), sound)
    assert 0 < bytes_read() - before < 100_000
    with pytest.raises(CheckpointError, match=r"the contents of params\.w are not what was saved"):
        checkpoints.restore(3, {"params": {"w": abstract(state).params["w"]}})


def before_arrays_are_read(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Once: after the checkpoint's own description was read, before its arrays."""
    handler = base_pytree_checkpoint_handler.BasePyTreeCheckpointHandler
    original, todo = handler._get_param_infos, [action]

    def hooked(self: Any, *args: Any, **options: Any) -> Any:
        if todo:
            todo.pop()()
        return original(self, *args, **options)

    monkeypatch.setattr(handler, "_get_param_infos", hooked)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["after it was listed", "while it is read"])
@pytest.mark.parametrize("where", ["local", "store"])
def test_a_checkpoint_that_vanishes_is_no_damaged_one(
    moment: str, where: str, store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = url if where == "store" else tmp_path / "c"
    writer = Checkpoints(folder, keep_last=1)
    save_and_wait(writer, 3)
    reader = Checkpoints(folder, read_only=True)
    assert reader.latest() == 3
    if moment == "while it is read":
        before_arrays_are_read(monkeypatch, lambda: save_and_wait(writer, 6))
    else:
        save_and_wait(writer, 6)
    with pytest.raises(VanishedError, match="/3 was removed or moved away before it was read"):
        reader.restore(3, {"params": abstract(made_up(3)).params})
    assert reader.steps() == [3]
    with pytest.raises(VanishedError):
        reader.info(3)
    with pytest.raises(VanishedError):
        reader.restore(3, abstract(made_up(3)))
    reader.reload()
    assert reader.latest() == 6
    assert_same(reader.restore(6, abstract(made_up(6))), made_up(6))


@pytest.mark.slow
def test_a_checkpoint_that_a_store_removes_file_by_file_is_no_damaged_one(store, url: str, monkeypatch) -> None:
    monkeypatch.setattr("tinypod.runs.failures.LOOK_AGAIN_S", 0.2)
    save_and_wait(Checkpoints(url), 3)
    reader = Checkpoints(url, read_only=True)
    names = sorted(store.files(f"{url}/3"), key=lambda name: ("/d/" not in name, name == MARKER))
    first = [name for name in names if "/d/" in name]

    def remove_rest() -> None:
        for name in names[len(first) :]:
            time.sleep(0.1)
            store.remove(f"{url}/3/{name}")

    def remove() -> None:
        for name in first:
            store.remove(f"{url}/3/{name}")
        thread.start()

    thread = threading.Thread(target=remove_rest)
    before_arrays_are_read(monkeypatch, remove)
    with pytest.raises(VanishedError):
        reader.restore(3, abstract(made_up(3)))
    thread.join()


def test_opening_looks_again_when_a_checkpoint_vanishes_meanwhile(tmp_path: Path, monkeypatch) -> None:
    writer = Checkpoints(tmp_path / "c", keep_last=1)
    save_and_wait(writer, 3)
    listing, todo = CheckpointManager.metrics, [lambda: save_and_wait(writer, 6)]

    def hooked(self: CheckpointManager, step: int) -> Any:
        if todo:
            todo.pop()()
            raise FileNotFoundError(step)
        return listing(self, step)

    monkeypatch.setattr(CheckpointManager, "metrics", hooked)
    assert Checkpoints(tmp_path / "c", read_only=True).steps() == [6]


def test_what_was_prepared_is_not_compiled_at_a_save(built, state, tmp_path: Path) -> None:
    checksums_module._jitted_checksums.cache_clear()  # what other tests compiled
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.prepare(built.abstract_state)
    compiled: list[str] = []

    def listener(event: str, _: float, **__: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    at_three, at_six = at(state, 3), at(state, 6)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        checkpoints.save(at_three, {})
        checkpoints.wait()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled == []
    checkpoints.save(jax.device_put(at_six, jax.devices()[0]), {})  # another layout is compiled for when it comes
    checkpoints.wait()
    for step in (3, 6):
        assert int(checkpoints.restore(step, built.abstract_state).step) == step


def state_files(folder: Path) -> list[Path]:
    return sorted((p for p in (folder / "state").rglob("*") if p.is_file()), key=lambda p: -p.stat().st_size)


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "metadata", "info", "empty"])
def test_a_damaged_checkpoint_is_refused_and_left_alone(built, state, tmp_path: Path, damage: str) -> None:
    saved(tmp_path / "c", state, [3, 6]).close()
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
    saved(tmp_path / "c", state, [6]).close()
    state_files(tmp_path / "c" / "6")[0].write_bytes(b"")
    with pytest.raises(CheckpointError, match="there is none before it"):
        Checkpoints(tmp_path / "c").restore(6, built.abstract_state)


def test_another_model_is_refused_with_what_differs(built, state, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "c", state, [3])
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
    checkpoints = saved(tmp_path / "c", state, [3, 6, 9])
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


def made_up(step: int, specs: dict[str, PartitionSpec] | None = None, mesh: Mesh | None = None) -> TrainState:
    """A small state whose contents follow from its step."""
    random = np.random.default_rng(step)
    arrays = {
        "w": random.normal(size=(8, 6)).astype(np.float32),
        "ids": random.integers(0, 9, (4, 8, 2)).astype(np.uint8),
        "half": random.normal(size=5).astype(jax.numpy.bfloat16),
    }
    mesh = mesh or Mesh(np.array(jax.devices()[:1]), ("x",))

    def put(name: str, x: np.ndarray) -> jax.Array:
        sharding = NamedSharding(mesh, (specs or {}).get(name, PartitionSpec()))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    params = {name: put(name, x) for name, x in arrays.items()}
    flag, number = put("flag", np.array([True, False])), put("step", np.asarray(step, np.int32))
    return TrainState(number, params, {"flag": flag}, {}, {})


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(restored: Any, expected: Any) -> None:
    for (name, new), old in zip(flatten(restored).items(), jax.tree.leaves(expected), strict=True):
        assert new.dtype == old.dtype, name
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes(), name
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim), name


def save_and_wait(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(made_up(step), {"a": step})
    checkpoints.wait()


numbers = count()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Store]:
    monkeypatch.setenv("TINYPOD_STORAGE_RETRY_S", "60")  # seconds of a busy machine; outages set their own
    yield gcs.shared()
    gcs.shared().recover()


@pytest.fixture
def url(store: gcs.Store) -> str:
    return f"gs://tinypod-test/run{next(numbers)}/checkpoints"


def test_a_checksum_is_the_same_on_any_mesh_and_sees_every_change() -> None:
    devices = np.array(jax.devices())
    specs = {"w": PartitionSpec("a"), "ids": PartitionSpec("b", "a")}
    whole = np.asarray(checksums(flatten(made_up(1))))
    mesh = Mesh(devices.reshape(4, 2), ("a", "b"))
    split = checksums(flatten(made_up(1, specs, mesh)))
    ahead = make_checksums(flatten(abstract(made_up(1, specs, mesh))))
    assert np.array_equal(whole, ahead(flatten(made_up(1, specs, mesh))))
    assert np.array_equal(whole, ahead(flatten(made_up(1))))  # not what it was made for
    assert np.array_equal(whole, split)
    assert split.sharding.is_fully_replicated
    flat = flatten(made_up(1))
    swapped = flat | {"params.w": flat["params.w"][::-1]}
    assert (np.asarray(checksums(swapped)) != whole).sum() == 1


def test_in_a_store_a_checkpoint_becomes_visible_with_its_marker_and_comes_back_to_the_bit(store, url: str) -> None:
    scores = {3: 0.9, 6: 0.1}
    checkpoints = Checkpoints(url, keep_last=1, score_of=scores.get)
    for step in (3, 6, 9):
        checkpoints.save(made_up(step), {"a": step})
    checkpoints.close()
    assert store.order(f"{url}/9")[-1] == MARKER
    again = Checkpoints(url, score_of=scores.get, read_only=True)
    assert again.steps() == [3, 9]
    assert {name.split("/")[0] for name in store.files(url)} == {"3", "9"}
    assert (again.best(), again.latest(), again.info(9)["a"]) == ((3, 0.9), 9, 9)
    assert again.incomplete() == []
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    elsewhere = made_up(9, {"w": PartitionSpec("a", "b"), "ids": PartitionSpec(None, "b")}, mesh)
    assert_same(again.restore(9, abstract(elsewhere)), elsewhere)


@pytest.mark.slow
def test_in_a_store_damage_and_another_model_are_refused_and_left_alone(store, url: str) -> None:
    checkpoints = Checkpoints(url)
    save_and_wait(checkpoints, 3)
    save_and_wait(checkpoints, 6)
    other = made_up(6)._replace(params={"w": made_up(6).params["w"]})
    with pytest.raises(CheckpointError, match=r"params.half: bfloat16\[5\] in the checkpoint, absent in this config"):
        checkpoints.restore(6, abstract(other))
    for name, content in store.files(f"{url}/6/state").items():
        if "d/" in name:
            middle = len(content) // 2
            store.put(f"{url}/6/state/{name}", content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    before = store.files(url)
    with pytest.raises(CheckpointError, match=f"{url}/6 is damaged: .*\n.*--from-step 3"):
        Checkpoints(url).restore(6, abstract(made_up(6)))
    assert store.files(url) == before
    assert_same(Checkpoints(url).restore(3, abstract(made_up(3))), made_up(3))
    assert [str(path) for path in checkpoints.set_aside_after(3)] == [f"{url.replace('checkpoints', SET_ASIDE)}/6"]
    assert checkpoints.steps() == [3]
    assert store.order(f"{url.replace('checkpoints', SET_ASIDE)}/6")[-1] == MARKER


@pytest.mark.slow
def test_a_checkpoint_copied_without_its_marker_is_reported_and_kept(store, url: str) -> None:
    save_and_wait(Checkpoints(url), 3)
    for name, content in store.files(f"{url}/3").items():
        if name != MARKER:
            store.put(f"{url}/7/{name}", content)
    copied = store.files(f"{url}/7")
    checkpoints = Checkpoints(url, keep_last=1)
    assert checkpoints.steps() == [3]
    (found,) = checkpoints.incomplete()
    assert str(found.path) == f"{url}/7"
    assert MARKER in str(found)
    save_and_wait(checkpoints, 5)
    assert store.files(f"{url}/7") == copied
    save_and_wait(checkpoints, 7)
    assert store.files(f"{url.replace('checkpoints', SET_ASIDE)}/7") == copied
    assert (checkpoints.steps(), checkpoints.incomplete()) == ([7], [])
    assert_same(checkpoints.restore(7, abstract(made_up(7))), made_up(7))


def test_a_store_that_refuses_for_a_while_is_asked_again(store, url: str) -> None:
    checkpoints = Checkpoints(url)
    refused = store.refused
    store.fail_for(0.8)
    save_and_wait(checkpoints, 3)
    store.fail_for(0.8)
    assert_same(checkpoints.restore(3, abstract(made_up(3))), made_up(3))
    assert store.refused >= refused + 4


@pytest.mark.slow
def test_a_store_that_stays_down_is_named_and_the_next_save_succeeds(store, url: str, monkeypatch) -> None:
    checkpoints = Checkpoints(url)
    save_and_wait(checkpoints, 3)
    # Some connections are lost before it goes down, too: on busy cores a second would be over by then.
    monkeypatch.setenv("TINYPOD_STORAGE_RETRY_S", "5")
    store.fail_after_writing(url.removeprefix("gs://tinypod-test/") + "/6/_CHECKPOINT_METADATA")  # a save has begun
    with pytest.raises(StorageError, match=f"{url}: saving a checkpoint failed: .*the latest complete one is step 3"):
        save_and_wait(checkpoints, 6)
    with pytest.raises(StorageError, match=url):
        checkpoints.restore(3, abstract(made_up(3)))
    with pytest.raises(StorageError, match=url):
        Checkpoints(url)
    store.recover()
    monkeypatch.setenv("TINYPOD_STORAGE_RETRY_S", "60")
    assert [name for name in store.files(f"{url}/6") if name == "_CHECKPOINT_METADATA"]  # half of it is there
    assert Checkpoints(url, read_only=True).steps() == [3]
    assert [str(found.path) for found in Checkpoints(url, read_only=True).incomplete()] == [f"{url}/6"]
    save_and_wait(checkpoints, 9)
    assert (checkpoints.steps(), checkpoints.incomplete(), store.files(f"{url}/6")) == ([3, 9], [], {})
    assert_same(checkpoints.restore(9, abstract(made_up(9))), made_up(9))


def test_opening_where_access_is_refused_or_nothing_is_found_is_the_users_to_mend(store, url: str) -> None:
    store.forbid(url.removeprefix("gs://tinypod-test/").split("/")[0])
    for read_only in (False, True):
        with pytest.raises(UserError, match="the store does not allow it") as caught:
            Checkpoints(url, read_only=read_only)
        assert caught.value.exit_code == 2
    error = failures.not_opened(storage.folder(url), FileNotFoundError("b/tinypod-test/o"))
    assert isinstance(error, UserError)
    assert error.exit_code == 2


def test_a_save_that_was_killed_is_reported_to_readers_and_removed_by_the_next_writer(tmp_path: Path) -> None:
    save_and_wait(Checkpoints(tmp_path / "c"), 3)
    script = """if True:
        import os, sys
        sys.path[:0] = sys.argv[2].split(":")
        from orbax.checkpoint._src.path import atomicity
        from test_checkpoints import Checkpoints, save_and_wait
        atomicity.AtomicRenameTemporaryPath.finalize = lambda *_: os.kill(os.getpid(), 9)
        save_and_wait(Checkpoints(sys.argv[1]), 6)
    """
    ended = subprocess.run([sys.executable, "-c", script, tmp_path / "c", IMPORTS])
    assert ended.returncode == -signal.SIGKILL
    reader = Checkpoints(tmp_path / "c", read_only=True)
    assert reader.steps() == [3]
    (found,) = reader.incomplete()
    assert "cut off" in str(found)
    assert Path(found.path).is_dir()
    assert Checkpoints(tmp_path / "c").incomplete() == []
    assert not Path(found.path).exists()


def test_a_checkpoint_of_each_so_many_hours_is_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep_last=9)
    for step in range(1, 7):
        save_and_wait(checkpoints, step)
    checkpoints.close()
    for step in range(1, 7):  # as if they were half an hour apart
        notes = tmp_path / "c" / str(step) / "_CHECKPOINT_METADATA"
        content = json.loads(notes.read_text())
        earlier = round((7 - step) * 1800e9)
        notes.write_text(json.dumps(content | {"commit_timestamp_nsecs": content["commit_timestamp_nsecs"] - earlier}))
    again = Checkpoints(tmp_path / "c", keep_last=1, keep_every_hours=0.95)
    save_and_wait(again, 7)
    assert again.steps() == [1, 3, 5, 7]
    again.close()
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["1", "3", "5", "7"]


FULL_DISK = """if True:
    import resource, sys
    sys.path[:0] = sys.argv[2].split(":")
    from test_checkpoints import *
    folder = Path(sys.argv[1])
    filler = folder / "filler"

    def fill():
        if sys.argv[3] == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (900, resource.RLIM_INFINITY))
        else:
            size = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
            filler.write_bytes(bytes(size - int(sys.argv[4])))

    def free():
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        filler.unlink(missing_ok=True)

    checkpoints = Checkpoints(folder / "c", keep_last=1)
    save_and_wait(checkpoints, 3)
    before = tree_of(folder / "c" / "3")
    for step in (6, 7):
        fill()
        try:
            save_and_wait(checkpoints, step)
        except StorageError as error:
            print(error)
        else:
            raise AssertionError("that should not have fitted")
        assert checkpoints.steps() == [3]
        free()
    assert tree_of(folder / "c" / "3") == before
    assert_same(checkpoints.restore(3, abstract(made_up(3))), made_up(3))
    save_and_wait(checkpoints, 9)
    assert checkpoints.steps() == [9]
    assert_same(checkpoints.restore(9, abstract(made_up(9))), made_up(9))
    checkpoints.close()
    assert [path.name for path in (folder / "c").iterdir()] == ["9"]
"""


@pytest.mark.parametrize("kind", ["tmpfs", "limit"])
def test_a_full_disk_is_reported_and_forgotten_once_there_is_room(kind: str, tmp_path: Path) -> None:
    """On a real file system that is full, and at the limit of a file's size."""
    command = [sys.executable, "-c", FULL_DISK, tmp_path, IMPORTS, kind, "8192"]
    expected = "Error writing"
    if kind == "tmpfs":
        mount = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
        inside = f"mount -t tmpfs -o size=1500k tmpfs {tmp_path} && "
        if shutil.which("unshare") is None or subprocess.run([*mount, inside + "true"], capture_output=True).returncode:
            pytest.skip("mounting a file system is not allowed here")
        command, expected = [*mount, inside + 'exec "$@"', "sh", *command], "no space left on the device"
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("saving a checkpoint failed") == 2
    assert expected in ended.stdout
    assert "the latest complete one is step 3" in ended.stdout
    assert "Traceback" not in ended.stderr


CLUSTER = """if True:
    import sys
    import jax
    tests, index, port, folder, server = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
    jax.config.update("jax_num_cpu_devices", 2)
    patience = dict.fromkeys(["initialization_timeout", "heartbeat_timeout_seconds", "shutdown_timeout_seconds"], 500)
    jax.distributed.initialize("127.0.0.1:" + port, 2, index, **patience)
    sys.path[:0] = tests.split(":")
    from functools import partial
    from test_checkpoints import *
    from tinypod.cluster.agreement import Cluster

    cluster = Cluster(index, 2)
    meet = partial(cluster.barrier, timeout_s=500)  # not on the devices: there Gloo waits for 30 s
    P = PartitionSpec
    fsdp = Mesh(np.array(jax.devices()), ("fsdp",)), {"w": P("fsdp"), "ids": P(None, "fsdp")}
    grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b")), {"w": P("a", "b"), "ids": P("b")}
    scores = {1: 0.5, 2: 0.7, 3: 0.7, 4: 0.6} if index == 0 else {}  # known where the metrics are
    retention = dict(keep_last=1, keep_every_hours=1, score_of=scores.get)
    checkpoints = Checkpoints(folder, cluster=cluster, timeout_s=500, **retention)
    checkpoints.prepare(abstract(made_up(0, fsdp[1], fsdp[0])))
    meet("compiled")
    for step in (1, 2, 3, 4):
        checkpoints.save(made_up(step, fsdp[1], fsdp[0]), {"a": step})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3, 4]
    wanted = made_up(4, grid[1], grid[0])
    restored = checkpoints.restore(4, abstract(wanted))
    for new, old in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
        assert new.sharding == old.sharding
        for a, b in zip(new.addressable_shards, old.addressable_shards, strict=True):
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
    assert checkpoints.info(4)["a"] == 4
    checkpoints.set_aside_after(3)
    assert checkpoints.steps() == [1, 3]
    if folder.startswith("gs://"):
        meet("both have set it aside")
        if index == 0:
            gcs.fail_for(server, 1000)
        meet("the store is down")
        try:
            checkpoints.save(made_up(5, fsdp[1], fsdp[0]), {})
            checkpoints.wait()
            raise AssertionError("that should have failed")
        except StorageError as error:
            assert folder in str(error)
        meet("both have seen it")
        if index == 0:
            gcs.fail_for(server, 0)
        meet("the store is up")
    checkpoints.save(made_up(6, grid[1], grid[0]), {"a": 6})
    checkpoints.close()
    jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local", "store"])
def test_processes_save_their_shards_and_one_process_restores_them(where: str, store, url: str, tmp_path: Path) -> None:
    folder = url if where == "store" else str(tmp_path / "run" / "checkpoints")
    environment = os.environ | {"XLA_FLAGS": "", "TINYPOD_STORAGE_RETRY_S": "10"}
    program = [sys.executable, "-c", CLUSTER, IMPORTS]
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [*program, str(index), port, folder, store.url], env=environment, stderr=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]
    try:
        errors = [process.communicate(timeout=550)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    checkpoints = Checkpoints(folder, score_of={3: 0.7, 6: 0.1}.get)
    assert checkpoints.steps() == [1, 3, 6]
    assert checkpoints.best() == (3, 0.7)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    for step in (3, 6):
        wanted = made_up(step, {"w": PartitionSpec("x"), "ids": PartitionSpec(None, "x")}, mesh)
        assert_same(checkpoints.restore(step, abstract(wanted)), wanted)
    written = store.files(f"{url}/3") if where == "store" else tree_of(Path(folder) / "3")
    assert {name.split("/")[1] for name in written if name.startswith("state/ocdbt.process_")} == {
        "ocdbt.process_0",
        "ocdbt.process_1",
    }


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
