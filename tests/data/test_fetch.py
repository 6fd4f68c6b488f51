"""A dataset in an object store is used from a copy on this host: against a server that speaks the store's protocol."""

import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

import gcs
from fixtures import write_4x4
from tinypod.data import fetch, puzzles
from tinypod.errors import DataError, StorageError, UserError
from tinypod.runs import storage

PATIENCE_S = 120.0  # for what a busy machine does sooner or later
numbers = count()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[gcs.Store]:
    monkeypatch.setenv("TINYPOD_STORAGE_RETRY_S", "60")  # seconds of a busy machine; outages set their own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield gcs.shared()
    gcs.shared().recover()


@pytest.fixture
def dataset(store: gcs.Store, tmp_path: Path) -> str:
    url = f"gs://tinypod-test/fetch/{next(numbers)}"
    for path in write_4x4(tmp_path / "made").iterdir():
        store.put(f"{url}/{path.name}", path.read_bytes())
    return url


def downloads(store: gcs.Store, name: str) -> int:
    return sum(
        method == "GET" and path.startswith("/download/") and path.endswith(name) for method, path in store.requests
    )


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


def test_a_fetch_waits_for_the_one_before_it(store, dataset: str, monkeypatch) -> None:
    kept = storage.cache_folder("datasets", dataset)
    kept.mkdir(parents=True)
    waits, before = threading.Event(), len(store.requests)

    class Lock(FileLock):
        def _acquire(self) -> None:
            waits.set()
            super()._acquire()

    monkeypatch.setattr(fetch, "FileLock", Lock)
    second = threading.Thread(target=fetch.fetch_dataset, args=(dataset,))
    with open(kept / ".lock", "a") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second.start()
        assert waits.wait(PATIENCE_S)
        assert len(store.requests) == before  # it has not so much as looked
    second.join(PATIENCE_S)
    assert (kept / "dataset.json").exists()


def test_a_fetch_does_not_wait_for_ever(store, dataset: str, monkeypatch) -> None:
    monkeypatch.setattr(fetch, "LOCK_PATIENCE_S", 0.0)
    kept = storage.cache_folder("datasets", dataset)
    kept.mkdir(parents=True)
    with open(kept / ".lock", "a") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="another process of this host has fetched it"):
            fetch.fetch_dataset(dataset)


@pytest.mark.parametrize("name", ["../evil", "../../evil", "/evil", "a/../../evil"])
def test_a_description_cannot_write_elsewhere(store, dataset: str, tmp_path: Path, name: str) -> None:
    described = json.loads(store.files(dataset)["dataset.json"])
    described["splits"][name] = described["splits"].pop("train")
    store.put(f"{dataset}/{name}.npz", store.files(dataset)["train.npz"])
    store.put(f"{dataset}/dataset.json", json.dumps(described).encode())
    with pytest.raises(DataError, match="not a dataset description"):
        fetch.fetch_dataset(dataset)
    kept = storage.cache_folder("datasets", dataset)
    assert [path.name for path in kept.iterdir()] == [".lock"]
    assert not list(tmp_path.rglob("evil*"))


def test_a_bucket_with_a_typo_is_the_users_to_mend(store, dataset: str) -> None:
    with pytest.raises(UserError, match=r"no dataset at gs://tinypod-tset/x .*no such bucket") as caught:
        fetch.fetch_dataset("gs://tinypod-tset/x")
    assert caught.value.exit_code == 2


def test_a_dataset_that_may_not_be_read_is_the_users_to_mend(store, dataset: str) -> None:
    store.forbid(dataset.removeprefix("gs://tinypod-test/"))
    with pytest.raises(UserError, match=r"the store does not allow it.*\(tinypod-test\).*gcloud auth") as caught:
        fetch.fetch_dataset(dataset)
    assert caught.value.exit_code == 2
