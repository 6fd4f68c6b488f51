"""One owner of a run in a bucket, against a server that keeps generations."""

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

import gcs
from fixtures import write_4x4
from test_training import in_a_process
from tinypod.errors import StorageError
from tinypod.runs import folder, lease
from tinypod.runs.lease import LAPSE_S, Lease, LeaseError, own

numbers = count()


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[gcs.Store]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield gcs.shared()
    gcs.shared().recover()


@pytest.fixture
def url(store: gcs.Store) -> str:
    return f"gs://tinypod-test/lease/{next(numbers)}"


def test_a_second_owner_is_refused_with_the_first_one_s_name(url: str) -> None:
    clock = Clock()
    first, second = Lease(url, "ada@laptop", clock=clock), Lease(url, "grace@pod", clock=clock)
    first.take()
    clock.now += 40
    with pytest.raises(LeaseError, match=r"belongs to ada@laptop, which renewed its lease 40.0 s ago") as caught:
        second.take()
    assert "lapses in 1 min 50 s" in str(caught.value)
    assert caught.value.exit_code == 2
    assert second.holder() == first.holder()
    first.release()
    assert second.holder() is None
    second.take()


def test_it_is_taken_over_only_when_it_has_lapsed(url: str) -> None:
    clock, told = Clock(), list[str]()
    first, second = Lease(url, "first", lost=told.append, clock=clock), Lease(url, "second", clock=clock)
    first.take()
    for _ in range(3):  # renewed, it does not lapse
        clock.now += LAPSE_S - 1
        first.renew()
        with pytest.raises(LeaseError, match="belongs to first"):
            second.take()
    clock.now += LAPSE_S + 1
    second.take()
    for _ in range(2):  # from now on the first writes nothing
        with pytest.raises(LeaseError, match="no longer belongs to first: second took it over"):
            first.check()
    assert len(told) == 1
    second.renew()
    first.release()  # not its own any more
    assert Lease(url, "third", clock=clock).holder().owner == "second"


def test_two_that_start_at_the_same_moment_do_not_both_win(url: str) -> None:
    """Both have read that nobody owns it, or that the owner's lease has lapsed, before either writes."""
    clock = Clock()
    for lapsed in (False, True):
        if lapsed:
            clock.now += 2 * LAPSE_S
        leases = [Lease(url, name, clock=clock) for name in ("a", "b")]
        seen = [one._read()[1] for one in leases]
        assert [one._write(generation) for one, generation in zip(leases, seen, strict=True)] == [True, False]
        assert leases[1].holder().owner == "a"


def test_of_many_in_threads_one_wins(url: str) -> None:
    won, refused, ready = list[str](), list[str](), threading.Barrier(8)

    def start(name: str) -> None:
        one = Lease(url, name)
        ready.wait()
        try:
            one.take()
            won.append(name)
        except LeaseError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start, args=(f"owner{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 7)
    assert all(won[0] in text for text in refused)


def test_an_answer_that_was_lost_is_not_a_refusal(store: gcs.Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store wrote, the connection broke, the client asked again and was refused: by its own first write."""
    one = Lease(url, "one")
    real = one._store()

    class Twice:
        read = staticmethod(real.read)

        @staticmethod
        def write(name: str, content: bytes, if_equal: bytes):
            real.write(name, content, if_equal=if_equal).result()
            return real.write(name, content, if_equal=if_equal)

    monkeypatch.setattr(one, "_store", Twice)
    one.take()
    one.renew()


def test_the_same_owner_comes_back_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice that was preempted and granted again; and a command that crashed and was started again here."""
    monkeypatch.setenv("TINYPOD_OWNER", "pod p/z/trainer")
    first = Lease(url)
    first.take()
    again = Lease(url)
    again.take()
    with pytest.raises(LeaseError, match="no longer belongs"):
        first.renew()
    monkeypatch.delenv("TINYPOD_OWNER")
    assert lease.this_owner() == lease.this_owner() != "pod p/z/trainer"


def test_what_is_damaged_is_replaced(store: gcs.Store, url: str) -> None:
    store.put(f"{url}/{lease.FILE}", b"{half")
    Lease(url, "one").take()
    assert Lease(url, "two").holder().owner == "one"


def test_nothing_is_copied_without_it(store: gcs.Store, url: str) -> None:
    """The old owner's heartbeat and its push before a checkpoint, after somebody took over."""
    run = folder.open_run(url)
    with own(run, lost=None) as ours:
        assert ours is not None
        run.publish("health/process_0.json", b"{}")
        (run.folder / "metrics.jsonl").write_bytes(b"old owner")
        ours._clock = lambda: ours.renewed_at - 2 * LAPSE_S  # so that the next one sees a lease that has lapsed
        ours.renew()
        Lease(url, "new owner").take()
        ours._clock = lambda: ours.renewed_at + LAPSE_S
        with pytest.raises(LeaseError, match="new owner took it over"):
            run.push()
        with pytest.raises(LeaseError, match="new owner took it over"):
            run.publish("health/process_0.json", b'{"late": 1}')
    assert store.files(url).keys() == {"health/process_0.json", lease.FILE}
    assert store.files(url)["health/process_0.json"] == b"{}"


def test_a_heartbeat_renews_it(store: gcs.Store, url: str) -> None:
    run, clock = folder.open_run(url), Clock()
    with own(run) as ours:
        assert ours is not None
        ours._clock = clock
        clock.now = ours.renewed_at + 1
        run.publish("health/process_0.json", b"{}")
        fresh = ours.renewed_at
        clock.now = fresh + 30
        run.publish("health/process_0.json", b"{}")
        assert ours.renewed_at == clock.now
    assert Lease(url).holder() is None


def test_who_owns_a_run_is_alone_with_it(store: gcs.Store, url: str, tmp_path: Path) -> None:
    """On one host by its lock, whoever asks; and only one that is locked is left as it is by a fetch."""
    run = folder.open_run(url)
    store.put(f"{url}/outcome.json", b"there")
    with own(run):
        with pytest.raises(folder.LockedError), own(folder.open_run(url)):
            pass
        run.fetch("outcome.json")
        assert not (run.folder / "outcome.json").exists()
    run.fetch("outcome.json")
    assert (run.folder / "outcome.json").read_bytes() == b"there"
    store.put(f"{url}/outcome.json", b"newer")
    run.push()  # not ours to write back
    assert store.files(url)["outcome.json"] == b"newer"
    store.remove(f"{url}/outcome.json")
    run.fetch("outcome.json")
    assert not (run.folder / "outcome.json").exists()


def test_a_store_that_is_away_is_an_outage_not_a_loss(store: gcs.Store, url: str, monkeypatch) -> None:
    ours = Lease(url, "one")
    ours.take()
    monkeypatch.setenv("TINYPOD_STORAGE_RETRY_S", "0.1")
    store.fail_for(600)
    with pytest.raises(StorageError):
        ours.renew()
    store.recover()
    monkeypatch.setenv("TINYPOD_STORAGE_RETRY_S", "60")
    ours.renew()


def test_one_that_is_held_is_renewed_and_given_back(url: str) -> None:
    renewals = threading.Semaphore(0)

    class Counted(Lease):
        def renew(self) -> None:
            super().renew()
            renewals.release()

    with Counted(url, "one").hold(every_s=0.01):
        for _ in range(2):
            assert renewals.acquire(timeout=60)
        with pytest.raises(LeaseError):
            Lease(url, "two").take()
    assert Lease(url, "two").holder() is None


def test_a_local_run_needs_none(tmp_path: Path) -> None:
    with own(folder.open_run(tmp_path)) as ours:
        assert ours is None


@pytest.mark.slow
def test_training_is_refused_before_anything_is_written(store: gcs.Store, url: str, tmp_path: Path) -> None:
    """By the real command; and the run is free again after its owner is done."""
    data, holder = write_4x4(tmp_path / "data"), Lease(url, "pod p/z/another")
    holder.take()
    refused = in_a_process(data, url, "steps=2")  # type: ignore[arg-type]
    assert refused.returncode == 2
    assert "this run belongs to pod p/z/another" in " ".join(refused.stderr.split())
    assert store.files(url).keys() == {lease.FILE}
    holder.release()
    done = in_a_process(data, url, "steps=2")  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    assert lease.FILE not in store.files(url)
    assert "checkpoints/2/commit_success.txt" in store.files(url)
