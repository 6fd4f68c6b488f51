"""What lies in an object store is used as if it lay here: against a server that speaks the store's protocol."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore

import gcs
from fixtures import tiny_config, write_4x4
from test_train import in_a_process
from tinypod import experiment
from tinypod.data import fetch, puzzles
from tinypod.errors import CheckpointError, DataError, StorageError, UserError
from tinypod.runs import folder as run
from tinypod.runs import storage
from tinypod.runs.folder import Run

numbers = count()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[gcs.Store]:
    monkeypatch.setenv("TINYPOD_STORAGE_RETRY_S", "5")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield gcs.shared()
    gcs.shared().recover()


@pytest.fixture
def url(store: gcs.Store) -> str:
    return f"gs://tinypod-test/storage/{next(numbers)}"


@pytest.fixture
def dataset(store: gcs.Store, url: str, tmp_path: Path) -> str:
    for path in write_4x4(tmp_path / "made").iterdir():
        store.put(f"{url}/{path.name}", path.read_bytes())
    return url


def downloads(store: gcs.Store, name: str) -> int:
    return sum(
        method == "GET" and path.startswith("/download/") and path.endswith(name) for method, path in store.requests
    )


def test_the_server_keeps_what_the_libraries_rely_on(store, url: str) -> None:
    """Conditional writes, reads of a range, listings below a prefix, empty and binary objects."""
    content = os.urandom(70_000) + b"\r\n--\r\n\r"
    bucket, _, path = url.removeprefix("gs://").partition("/")
    context = tensorstore.Context({"gcs_request_retries": storage.tensorstore_retries()})
    spec = {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}
    kvstore = tensorstore.KvStore.open(spec, context=context).result()
    first = kvstore.write("a", content).result().generation
    assert kvstore.write("a", b"second", if_equal=first).result().generation != first
    kvstore.write("a", b"third", if_equal=first).result()  # it is another by now
    assert kvstore.read("a").result().value == b"second"
    (storage.folder(url) / "b" / "c").write_bytes(content)
    (storage.folder(url) / "empty").write_bytes(b"")
    assert kvstore.read("b/c").result().value == content
    assert storage._file_system().cat_file(f"{url}/b/c", start=1000, end=1100) == content[1000:1100]
    assert sorted(kvstore.list().result()) == [b"a", b"b/c", b"empty"]
    assert storage.files_under(storage.folder(url)) == ["a", "b/c", "empty"]
    assert (storage.folder(url) / "empty").read_bytes() == b""


def test_urls_survive_pathlib(tmp_path: Path) -> None:
    assert storage.is_remote(Path("gs://bucket/runs/x"))
    assert storage.url_of(Path("gs://bucket/runs/x")) == "gs://bucket/runs/x"
    assert storage.url_of("gs://bucket/runs/x/") == "gs://bucket/runs/x"
    assert not storage.is_remote(tmp_path)
    assert fetch.local_dataset(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match="gs://BUCKET/FOLDER"):
        storage.url_of("gs://")


def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs.core", None)
    with pytest.raises(UserError, match=r"pip install 'tinypod\[gcs\]'"):
        storage.connect.__wrapped__()


def test_a_dataset_is_fetched_once_and_what_is_damaged_here_again(store, dataset: str, tmp_path: Path) -> None:
    folder = fetch.local_dataset(dataset)
    assert tmp_path / "cache" in folder.parents
    info = puzzles.read_info(folder)
    expected = puzzles.read_split(tmp_path / "made", info, "train")
    assert np.array_equal(puzzles.read_split(folder, info, "train").inputs, expected.inputs)
    train, test = downloads(store, "train.npz"), downloads(store, "test.npz")
    assert fetch.local_dataset(dataset) == folder
    assert (downloads(store, "train.npz"), downloads(store, "test.npz")) == (train, test)
    (folder / "train.npz").write_bytes(b"cut short")
    fetch.local_dataset(dataset)
    assert (downloads(store, "train.npz") > train, downloads(store, "test.npz")) == (True, test)
    assert np.array_equal(puzzles.read_split(folder, info, "train").inputs, expected.inputs)


def test_a_file_that_is_not_what_its_description_says_is_refused_by_name(store, dataset: str) -> None:
    store.put(f"{dataset}/test.npz", b"something else")
    with pytest.raises(DataError, match=f"{dataset}/test.npz: its contents are not those"):
        fetch.fetch_dataset(dataset)
    kept = storage.cache_folder("datasets", dataset)
    assert sorted(path.name for path in kept.iterdir()) == [".lock", "train.npz"]
    store.remove(f"{dataset}/test.npz")
    with pytest.raises(DataError, match=f"{dataset}/test.npz: missing"):
        fetch.fetch_dataset(dataset)
    with pytest.raises(DataError, match=f"no dataset at {dataset}/nothing"):
        fetch.fetch_dataset(f"{dataset}/nothing")


def test_a_store_that_refuses_is_asked_again_and_then_named(store, dataset: str, monkeypatch) -> None:
    store.fail_next(3)
    assert (fetch.fetch_dataset(dataset) / "train.npz").exists()
    monkeypatch.setenv("TINYPOD_STORAGE_RETRY_S", "1")
    store.fail_for(60)
    with pytest.raises(StorageError, match=f"{dataset}: the object store did not answer") as caught:
        fetch.fetch_dataset(dataset)
    assert caught.value.exit_code == 75


def test_of_several_processes_one_fetches(store, dataset: str) -> None:
    before = len(store.requests)
    script = "import sys; from tinypod.data import fetch; print(fetch.fetch_dataset(sys.argv[1]))"
    processes = [
        subprocess.Popen([sys.executable, "-c", script, dataset], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    folders = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert folders == {str(storage.cache_folder("datasets", dataset))}
    paths = [path for method, path in store.requests[before:] if path.startswith("/download/") and "npz" in path]
    assert len(paths) == len(set(paths)) == 2


def test_a_fetch_waits_for_the_one_before_it(store, dataset: str) -> None:
    kept = storage.cache_folder("datasets", dataset)
    kept.mkdir(parents=True)
    storage.connect()  # what takes its time is the lock
    second = threading.Thread(target=fetch.fetch_dataset, args=(dataset,))
    with open(kept / ".lock", "a") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second.start()
        second.join(1.0)
        assert second.is_alive()
        assert not (kept / "dataset.json").exists()
    second.join()
    assert (kept / "dataset.json").exists()


def test_tensorstore_has_the_same_patience(store, url: str) -> None:
    bucket, _, path = url.removeprefix("gs://").partition("/")
    context = tensorstore.Context({"gcs_request_retries": storage.tensorstore_retries()})
    spec = {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}
    kvstore = tensorstore.KvStore.open(spec, context=context).result()
    store.fail_next(2)
    kvstore.write("a", b"1").result()
    assert store.files(url) == {"a": b"1"}


def test_what_another_process_writes_is_seen(store, url: str) -> None:
    folder = storage.folder(url)
    store.put(f"{url}/a", b"1")
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert not (folder / "b").exists()
    store.put(f"{url}/b", b"2")
    store.put(f"{url}/a", b"11")
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]
    assert (folder / "b").exists()
    assert (folder / "a").read_bytes() == b"11"


def elsewhere(one: Run, tmp_path: Path) -> Run:
    """The same run seen from another host."""
    return Run(tmp_path / "other_host", one.remote)


def test_small_files_go_to_the_store_when_they_change_and_come_back(store, url: str, tmp_path: Path) -> None:
    here = run.open_run(url)
    assert (here.remote, here.checkpoints) == (url, f"{url}/checkpoints")
    here.pull()  # nothing there: a new run
    (here.folder / "config.yaml").write_text("steps: 1\n")
    (here.folder / "health").mkdir()
    (here.folder / "health" / "0.json").write_text("{}")
    (here.folder / "checkpoints").mkdir()
    (here.folder / "checkpoints" / "no").write_text("not a small file")
    here.push()
    assert store.files(url) == {"config.yaml": b"steps: 1\n", "health/0.json": b"{}"}
    first = store.order(url)
    with open(here.folder / "metrics.jsonl", "a") as file:
        file.write("{}\n")
    here.push()
    assert store.order(url) == [*first, "metrics.jsonl"]  # the others were not written again
    here.publish("health/1.json", b"alive")
    there = elsewhere(here, tmp_path)
    there.pull()
    assert (there.folder / "metrics.jsonl").read_text() == "{}\n"
    assert (there.folder / "health" / "1.json").read_bytes() == b"alive"
    written = len(store.requests)
    there.push()
    assert len(store.requests) == written


def test_a_pull_drops_what_never_reached_the_store_but_not_of_a_run_at_work(store, url: str) -> None:
    one = run.open_run(url)
    one.pull()
    (one.folder / "metrics.jsonl").write_text("1\n")
    one.push()
    (one.folder / "metrics.jsonl").write_text("1\n2\n")
    (one.folder / "goodput.json").write_text("{}")
    with run.lock(one):
        run.open_run(url).pull()  # `tinypod eval` beside the training
        assert (one.folder / "metrics.jsonl").read_text() == "1\n2\n"
    again = run.open_run(url)
    again.pull()
    assert (again.folder / "metrics.jsonl").read_text() == "1\n"
    assert not (again.folder / "goodput.json").exists()


def test_a_local_run_has_nothing_to_push_or_pull(tmp_path: Path) -> None:
    local = run.open_run(tmp_path / "runs" / "x")
    assert (local.folder, local.remote, local.checkpoints) == (
        tmp_path / "runs" / "x",
        None,
        tmp_path / "runs" / "x" / "checkpoints",
    )
    local.publish("health/0.json", b"1")
    local.push()
    local.pull()
    assert (local.folder / "health" / "0.json").read_bytes() == b"1"


def test_a_run_in_a_store_is_loaded_on_another_host(store, dataset: str, url: str, monkeypatch, tmp_path: Path) -> None:
    config = tiny_config(Path("ignored"), f"data.path={dataset}")
    assert run.with_absolute_paths(config).data.path == dataset
    built = experiment.build(config)
    state = built.init()
    first = run.open_run(f"{url}/run")
    first.pull()
    with pytest.raises(UserError, match=f"{url}/run is not a run folder"):
        run.load_state(first, [], "latest")
    run.write_config(first, config)
    first.push()
    with pytest.raises(CheckpointError, match=f"{url}/run: no checkpoint yet"):
        run.load_state(first, [], "latest")
    checkpoints = run.open_checkpoints(first, config)
    checkpoints.save(state, run.about(built))
    checkpoints.close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache of another host"))
    loaded, restored = run.load_state(run.open_run(f"{url}/run"), [], "latest")
    assert loaded.config == config
    for new, old in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert np.array_equal(new, old)


@pytest.mark.slow
def test_a_run_in_a_store_goes_on_on_another_host(store, dataset: str, url: str, monkeypatch, tmp_path: Path) -> None:
    """Five steps here, five there, with nothing but the store in common: to the bit what one host would have."""
    for steps, host in (("steps=5", "first"), ("steps=10", "second")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / host))
        done = in_a_process(Path("unused"), f"{url}/run", f"data.path={dataset}", steps)
        assert done.returncode == 0, done.stderr
    assert "going on from the checkpoint of step 5" in done.stdout
    done = in_a_process(Path("unused"), tmp_path / "here", f"data.path={dataset}")
    assert done.returncode == 0, done.stderr
    states = [run.load_state(run.open_run(where), [], "10")[1] for where in (f"{url}/run", tmp_path / "here")]
    for new, old in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()
    content = (storage.folder(f"{url}/run") / "metrics.jsonl").read_text()
    logged = [json.loads(line)["step"] for line in content.splitlines()]
    assert logged == [2, 4, 5, 5, 6, 8, 10, 10]
