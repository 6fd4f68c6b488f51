"""What lies in an object store is used as if it lay here: against a server that speaks the store's protocol."""

import errno
import json
import logging
import os
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore

import gcs
from fixtures import tiny_config, write_4x4
from test_training import in_a_process
from tinypod import experiment
from tinypod.data import fetch
from tinypod.errors import CheckpointError, StorageError, UserError
from tinypod.runs import folder as run
from tinypod.runs import storage
from tinypod.runs.config_history import write_config
from tinypod.runs.folder import Run
from tinypod.runs.load import load_weights
from tinypod.runs.saver import about, open_checkpoints

numbers = count()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[gcs.Store]:
    monkeypatch.setenv("TINYPOD_STORAGE_RETRY_S", "60")  # seconds of a busy machine; outages set their own
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
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"pip install 'tinypod\[gcs\]'"):
        storage.connect.__wrapped__()


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


@pytest.mark.parametrize(
    "name", ["", ".", "/", "/etc/x", "..", "../x", "a/../x", "a/../../x", "a/..", "a\0b", "link/x", "loop/x"]
)
def test_a_name_from_outside_stays_inside(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    with pytest.raises(UserError) as caught:
        storage.inside(folder, name)
    assert repr(name) in str(caught.value)
    assert str(folder) in str(caught.value)


def test_names_that_are_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")  # the run folder itself may be one
    for name in ("x", "a/b.json", "a..b", "...", "..x/y"):
        assert storage.inside(tmp_path / "link", name) == tmp_path / "link" / name


def test_a_file_that_is_replaced_while_it_is_read_is_whole(store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gcsfs import GCSFileSystem

    store.put(f"{url}/a", b'{"old": 1}')
    original = GCSFileSystem._info

    async def info(self, path: str, *rest, **more):
        """Of what was there a moment ago."""
        found = await original(self, path, *rest, **more)
        store.put(f"{url}/a", b'{"new and longer": 2}')
        return found

    monkeypatch.setattr(GCSFileSystem, "_info", info)
    assert storage.read_whole(storage.folder(url) / "a") in (b'{"old": 1}', b'{"new and longer": 2}')
    with pytest.raises(FileNotFoundError):
        storage.read_whole(storage.folder(url) / "b")


@pytest.mark.parametrize("name", ["../evil", "../../../evil", "health/../../evil", "/evil"])
def test_a_bucket_cannot_write_outside_a_run(store, url: str, tmp_path: Path, name: str) -> None:
    one = run.open_run(url)
    store.put(f"{url}/config.yaml", b"steps: 1")
    store.put(f"{url}/{name}", b"evil")
    with pytest.raises(UserError, match="cannot be the name of a file in") as caught:
        one.pull()
    assert repr(name) in str(caught.value)
    assert caught.value.exit_code == 2
    assert not list(tmp_path.rglob("evil"))
    with pytest.raises(UserError, match="cannot be the name"):
        one._write(name, b"evil")


def test_a_folder_that_a_console_made_is_no_file(store, url: str) -> None:
    for name in ("", "health/", "config.yaml"):
        store.put(f"{url}/{name}", b"")
    assert storage.files_under(storage.folder(url)) == ["config.yaml"]


def tensorstore_error(store: gcs.Store, url: str) -> Exception:
    bucket, _, path = url.removeprefix("gs://").partition("/")
    spec = {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}
    context = tensorstore.Context({"gcs_request_retries": {"max_retries": 1, "initial_delay": "10ms"}})
    with pytest.raises(ValueError) as caught:
        tensorstore.KvStore.open(spec, context=context).result().write("a", b"1").result()
    return caught.value


def gcsfs_error(store: gcs.Store, url: str) -> Exception:
    with pytest.raises(Exception) as caught:
        (storage.folder(url) / "a").write_bytes(b"1")
    return caught.value


@pytest.mark.parametrize("error_of", [tensorstore_error, gcsfs_error])
def test_what_the_store_answers_decides_who_mends_it(store, url: str, monkeypatch, error_of) -> None:
    """By both libraries: a bucket with a typo and a 403 are the user's, a 503 may pass."""
    typo = url.replace("tinypod-test", "tinypod-tset")
    error = error_of(store, typo)
    assert not storage.is_outage(error)
    told = storage.explain(typo, error)
    assert (type(told), told.exit_code) == (UserError, 2)
    assert f"{typo}: not found; is there a bucket tinypod-tset" in str(told)
    store.forbid(url.removeprefix("gs://tinypod-test/"))
    error = error_of(store, url)
    assert not storage.is_outage(error)
    told = storage.explain(url, error)
    assert (type(told), told.exit_code) == (UserError, 2)
    for part in (url, "bucket (tinypod-test)", "gcloud auth application-default login", "may read and write"):
        assert part in str(told)
    store.recover()
    store.fail_for(600)
    monkeypatch.setenv("TINYPOD_STORAGE_RETRY_S", "0.1")
    error = error_of(store, url)
    assert storage.is_outage(error)
    told = storage.explain(url, error)
    assert (type(told), told.exit_code) == (StorageError, 75)
    assert "the object store did not answer" in str(told)


def test_a_run_in_a_bucket_with_a_typo_ends_at_once(store) -> None:
    with pytest.raises(UserError, match="is there a bucket tinypod-tset") as caught:
        run.open_run("gs://tinypod-tset/runs/x").pull()
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error", "/data/run, 500"),
        ValueError("shape (3, 500) UNAVAILABLE Service Unavailable 503"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 503 bytes"),
        ValueError("NOT_FOUND: Failed to open: \"/proc/1/a\": No such file or directory [os_error_code='2']"),
        TimeoutError(errno.ETIMEDOUT, "Connection timed out", "/nfs/run"),
        FileNotFoundError(errno.ENOENT, "No such file", "/run/, 503"),
    ],
)
def test_an_error_of_a_local_disk_is_no_outage_of_a_store(error: Exception) -> None:
    assert not storage.is_outage(error)
    assert storage.status_of(error) is None
    told = storage.explain("/data/run", error)
    assert isinstance(told, StorageError)
    assert "object store" not in str(told)


def test_a_local_path_has_no_store_to_blame() -> None:
    assert "object store" not in str(storage.explain("/data/run", TimeoutError("of something else")))
    assert isinstance(storage.explain("/data/run", OSError("Forbidden: b/x")), StorageError)


def test_a_store_that_cannot_be_reached_is_an_outage(store, url: str, monkeypatch) -> None:
    monkeypatch.setenv("TINYPOD_STORAGE_RETRY_S", "0.1")
    import fsspec

    closed = gcs.Store("gone")
    closed.close()
    away = fsspec.filesystem("gcs", endpoint_url=closed.url)
    with pytest.raises(storage.Unavailable, match="Cannot connect") as caught:
        away.cat_file("gone/x")
    assert storage.is_outage(caught.value)
    assert storage.is_outage(TimeoutError())
    wrapped = RuntimeError("saving failed")
    wrapped.__cause__ = caught.value
    assert storage.is_outage(wrapped)
    assert storage.is_outage(ValueError("UNAVAILABLE: no answer from the metadata server"))
    assert storage.is_outage(ValueError("ABORTED: All 3 retry attempts failed: CURL error [curl_code='7']"))


def test_patience_is_counted_in_seconds_and_told_once(store, url: str, monkeypatch, caplog) -> None:
    (storage.folder(url) / "a").write_bytes(b"1")
    refused = store.refused
    store.fail_next(3)
    (storage.folder(url) / "a").write_bytes(b"22")
    assert store.refused == refused + 3
    assert store.files(url) == {"a": b"22"}
    monkeypatch.setenv("TINYPOD_STORAGE_RETRY_S", "0")
    store.fail_for(600)
    with caplog.at_level(logging.DEBUG), pytest.raises(storage.Unavailable, match="503"):
        storage._file_system().cat_file(f"{url}/a")
    assert store.refused == refused + 4  # gcsfs does not start again on its own
    assert "Traceback" not in caplog.text


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


def test_the_lock_of_this_host_is_not_replaced_by_an_object_of_its_name(store, url: str) -> None:
    one = run.open_run(url)
    store.put(f"{url}/config.yaml", b"steps: 1")
    store.put(f"{url}/{run.LOCK}", b"from elsewhere")
    with run.lock(one):
        held = (one.folder / run.LOCK).stat().st_ino
        one.pull(locked=True)
        assert (one.folder / run.LOCK).stat().st_ino == held  # another file would be free to lock
        with pytest.raises(UserError, match="another process is training here"), run.lock(one):
            pass
    assert (one.folder / "config.yaml").exists()


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


@pytest.mark.slow
def test_a_run_in_a_store_is_loaded_on_another_host(store, dataset: str, url: str, monkeypatch, tmp_path: Path) -> None:
    config = tiny_config(Path("ignored"), f"data.path={dataset}")
    assert run.with_absolute_paths(config).data.path == dataset
    built = experiment.build(config)
    state = built.init()
    first = run.open_run(f"{url}/run")
    first.pull()
    with pytest.raises(UserError, match=f"{url}/run is not a run folder"):
        load_weights(first, [], "latest")
    write_config(first, config, 0, [])
    first.push()
    with pytest.raises(CheckpointError, match=f"{url}/run: no checkpoint yet"):
        load_weights(first, [], "latest")
    checkpoints = open_checkpoints(first, built, {})
    checkpoints.save(state, about(built))
    checkpoints.close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache of another host"))
    loaded = load_weights(run.open_run(f"{url}/run"), [], "latest", "live")
    assert loaded.experiment.config == config
    for new, old in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(state.params), strict=True):
        assert np.array_equal(new, old)


@pytest.mark.slow
def test_a_run_in_a_store_goes_on_on_another_host(store, dataset: str, url: str, monkeypatch, tmp_path: Path) -> None:
    """Five steps here, five there, with nothing but the store in common: to the bit what one host would have."""
    for steps, host in (("steps=5", "first"), ("steps=10", "second")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / host))
        done = in_a_process(Path("unused"), f"{url}/run", f"data.path={dataset}", steps)
        assert done.returncode == 0, done.stderr
    assert "resuming from the checkpoint of step 5" in done.stdout
    done = in_a_process(Path("unused"), tmp_path / "here", f"data.path={dataset}")
    assert done.returncode == 0, done.stderr
    places = (f"{url}/run", tmp_path / "here")
    weights = [load_weights(run.open_run(where), [], "10").params for where in places]
    for new, old in zip(*map(jax.tree.leaves, weights), strict=True):
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()
    content = (storage.folder(f"{url}/run") / "metrics.jsonl").read_text()
    logged = [json.loads(line)["step"] for line in content.splitlines()]
    assert logged == [2, 4, 5, 5, 6, 8, 10, 10]
