"""Watching a run: what is restarted, what is asked for again, when it ends. Real processes stand in for training."""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from specs import make_spec
from stand_in import Cloud
from test_lifecycle import recording, text

import gcs
from tinypod.errors import UserError
from tinypod.pod import keep, ship
from tinypod.pod.gcloud import Gcloud, GcloudError
from tinypod.pod.job import Job
from tinypod.pod.keep import PodRun, SpendingLimit
from tinypod.runs.folder import open_run
from tinypod.runs.lease import Lease, LeaseError

numbers = count()
# Ends as the next line of a file says; `wait` until SIGTERM.
PROGRAM = """
import os, signal, sys, time
path = os.environ["ENDS"]
first, *rest = open(path).read().splitlines()
if os.environ.get("BY_NUMBER"):  # several workers: each has a line of its own
    first = open(path).read().splitlines()[int(sys.argv[-2].partition("=")[2])]
else:
    open(path, "w").write("\\n".join(rest))
print("this start ends with", first, os.environ["TINYPOD_OWNER"], *sys.argv[1:], flush=True)
if first == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(143)))
    time.sleep(600)
sys.exit(int(first))
"""
FILES = {"tinypod/__init__.py": b"", "tinypod/__main__.py": PROGRAM.encode()}


class Story:
    """A run on a slice of one host, whose process ends as it is told, start for start."""

    def __init__(self, cloud: Cloud, folder: Path, url: str) -> None:
        self.cloud, self.url, self.ends = cloud, url, folder / "ends"
        self.console, self.waits = recording(), list[float]()
        self.at_wait: Callable[[int], None] = lambda number: None
        self.command: tuple[str, ...] = ("train", "config.yaml", f"--run={url}")
        self.apart = False

    def pod_run(self, **changes) -> PodRun:
        environment = {"ENDS": str(self.ends)}
        more = {"type": "v4-8", "python": sys.executable, "environment": environment}
        gcloud = Gcloud(make_spec(**{**more, **changes}))
        job = Job(self.url, {"config.yaml": "steps: 1\n"}, self.command, (), self.apart)
        return PodRun(gcloud, open_run(self.url), job, self.console, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.at_wait(len(self.waits))

    def keep(self, *ends: str, **changes) -> int:
        self.ends.write_text("\n".join(ends))
        return self.pod_run(**changes).keep()

    @property
    def text(self) -> str:
        return text(self.console)

    @property
    def starts(self) -> int:
        return self.text.count("this start ends with")

    def at_step(self, step: int) -> None:
        """What the run's process 0 would have said in the bucket."""
        beat = {"process": 0, "count": 1, "step": step, "time": 4e9 + step}
        gcs.shared().put(f"{self.url}/health/process_0.json", json.dumps(beat).encode())


@pytest.fixture
def story(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ship, "files_to_ship", lambda config, code: FILES)
    gcs.shared()
    yield Story(cloud, tmp_path, f"gs://tinypod-test/keep/{next(numbers)}")
    gcs.shared().recover()


def creations(cloud: Cloud) -> int:
    return cloud.commands().count("tpu-vm create")


def test_until_it_is_done(story: Story, cloud: Cloud) -> None:
    assert story.keep("76", "1", "0", retry_s=0.25) == 0
    assert (story.starts, creations(cloud)) == (3, 2)  # the second failure at a step might be the slice's
    assert "pod my-project/us-central2-b/trainer train config.yaml --run=" + story.url in story.text
    assert "training ended before its first step with exit code 76: a deadline passed" in story.text
    assert [wait for wait in story.waits if wait >= 0.25] == [0.25, 0.5]
    logs = list(story.pod_run().logs.glob("worker_0.log"))
    assert logs[0].read_text().count("this start ends with") == 3
    assert gcs.shared().files(story.url).keys() == {"pod.json"}  # and no lease is left


def test_a_study_is_done_when_its_first_worker_says_so(story: Story, cloud: Cloud) -> None:
    """One crashed, the other trained its runs as well: nothing is left to start again."""
    story.apart, story.command = True, ("study", "run", "s.yaml", f"--folder={story.url}")
    assert story.keep("0", "1", type="v4-16", environment={"ENDS": str(story.ends), "BY_NUMBER": "1"}) == 0
    assert (story.starts, creations(cloud)) == (2, 1)
    for number in range(2):
        assert f"s.yaml --folder={story.url} --worker={number} --workers=2" in story.text


def test_a_study_that_gets_no_further_is_given_up(story: Story) -> None:
    """Its progress is that of all its runs together."""
    story.apart = True
    gcs.shared().put(f"{story.url}/study.json", json.dumps({"runs": [{"name": "a"}, {"name": "b"}]}).encode())
    for name, step in (("a", 30), ("b", 12)):
        outcome = json.dumps({"state": "waiting", "step": step}).encode()
        gcs.shared().put(f"{story.url}/runs/{name}/outcome.json", outcome)
    assert story.keep("1", "1", "1", "0") == 1
    assert "gave up: the run failed 3 times at step 42" in story.text


def test_three_failures_at_one_step_are_enough(story: Story) -> None:
    story.at_step(7)
    assert story.keep("76", "78", "76", "0") == 76
    assert story.starts == 3
    assert "gave up: the run failed 3 times at step 7" in story.text


@pytest.mark.slow
def test_a_run_that_gets_further_has_its_tries_again(story: Story) -> None:
    def further(number: int) -> None:
        story.at_step(10 * story.starts)

    story.at_wait = further
    assert story.keep("1", "1", "1", "0") == 0
    assert story.starts == 4


@pytest.mark.parametrize("code", ["2", "80"])
def test_what_no_restart_mends_ends_it_at_once(story: Story, cloud: Cloud, code: str) -> None:
    assert story.keep(code, "0") == int(code)
    assert (story.starts, creations(cloud)) == (1, 1)
    assert "tpu-vm delete" not in cloud.commands()


def test_a_preempted_slice_is_asked_for_again_with_growing_pauses(story: Story, cloud: Cloud) -> None:
    """Preemption is nobody's failure, however often it comes."""
    preemptions = []

    def preempt(number: int) -> None:
        with cloud.state() as state:
            up = state["nodes"].get("trainer", {}).get("state") == "READY"
        if up and len(preemptions) < 3 and story.starts == len(preemptions) + 1:
            preemptions.append(number)
            cloud.order(lacking=2)
            cloud.preempt("trainer")

    story.at_wait = preempt
    assert story.keep("wait", "wait", "wait", "0", request={"kind": "spot"}, retry_s=0.25) == 0
    assert len(preemptions) == 3
    assert story.text.count("the slice was lost before its first step: lost (PREEMPTED)") == 3
    assert story.text.count("no more capacity in the zone") == 6
    assert [wait for wait in story.waits if wait >= 0.25] == [0.25 * 2**n for n in range(6)]


def test_a_worker_that_does_not_answer_makes_a_slice_faulty(story: Story, cloud: Cloud) -> None:
    def break_it(number: int) -> None:
        with cloud.state() as state:
            if "tpu-vm delete" in cloud.commands():
                state["orders"].pop("bad_worker", None)
            elif story.starts:
                state["orders"]["bad_worker"] = 0

    story.at_wait = break_it
    assert story.keep("wait", "0") == 0
    assert "but a worker does not answer: " in story.text
    assert creations(cloud) == 2


def test_the_spending_limit(story: Story, cloud: Cloud) -> None:
    """The run is stopped so that it saves, and the slice is deleted; starting again spends nothing."""
    limits = {"spending_limit_dollars": 0.5, "dollars_per_chip_hour": 3600.0}
    story.at_wait = lambda number: None
    with pytest.raises(SpendingLimit, match=r"the slice is deleted, and the run can be resumed") as caught:
        story.keep("wait", "0", **limits)
    assert "of $0.50 for" in str(caught.value)
    assert "saved" in story.text
    with cloud.state() as state:
        assert state["nodes"] == {}
    made = creations(cloud)
    with pytest.raises(SpendingLimit):
        story.keep("0", **limits)
    assert creations(cloud) == made


def test_a_slice_that_somebody_deleted_is_not_asked_for_again(story: Story, cloud: Cloud) -> None:
    """`pod down` on another machine: training ends with 143 first, and then the slice goes."""

    def down(number: int) -> None:
        if story.starts:
            with cloud.state() as state:
                state["nodes"].pop("trainer", None)
            cloud.destroy("trainer")

    story.at_wait = down
    with pytest.raises(UserError, match="somebody deleted the slice"):
        story.keep("143", "0")
    assert (story.starts, creations(cloud)) == (1, 1)


def test_one_machine_keeps_and_one_slice_trains(story: Story, cloud: Cloud) -> None:
    other = Lease(story.url, "ada@laptop", file=keep.KEEPER)
    other.take()
    with pytest.raises(LeaseError, match="belongs to ada@laptop"):
        story.keep("0")
    other.release()
    trains = Lease(story.url, "pod p/z/another")
    trains.take()
    with pytest.raises(LeaseError, match="belongs to pod p/z/another"):
        story.keep("0")
    with pytest.raises(LeaseError, match="belongs to pod p/z/another"):
        story.pod_run().once()
    assert cloud.calls() == []  # before anything was asked for


def test_another_machine_attaches(story: Story, cloud: Cloud) -> None:
    story.ends.write_text("wait")

    class Closed(Exception):
        """The laptop."""

    def close(number: int) -> None:
        if story.starts:
            raise Closed

    story.at_wait = close
    Gcloud(make_spec(type="v4-8")).create_node()
    with pytest.raises(Closed):
        story.pod_run().once()
    again = Story(cloud, story.ends.parent, story.url)
    again.at_wait = lambda number: again_run.workers.stop(60)
    again_run = again.pod_run()
    assert again_run.once() == 143
    assert "is being trained on trainer: attaching to it" in again.text
    assert (story.starts, again.starts) == (1, 0)  # what was shown before is not shown again
    assert "[0] saved" in again.text
    elsewhere = Story(cloud, story.ends.parent, story.url + "-other")
    elsewhere.ends.write_text("wait")
    elsewhere.at_wait = close_when_started(elsewhere, Closed)
    with pytest.raises(Closed):
        elsewhere.pod_run().once()
    with pytest.raises(UserError, match=f"trains another run: {elsewhere.url}"):
        story.pod_run().once()
    elsewhere.pod_run().workers.stop(60)


def close_when_started(story: Story, error: type[Exception]) -> Callable[[int], None]:
    def close(number: int) -> None:
        if story.starts:
            raise error

    return close


def test_without_keep_it_needs_a_slice_and_says_when_it_is_gone(story: Story, cloud: Cloud) -> None:
    with pytest.raises(UserError, match=r"the slice is absent .*`tinypod pod up` brings it up"):
        story.pod_run().once()
    Gcloud(make_spec(type="v4-8")).create_node()
    story.ends.write_text("wait")
    story.at_wait = lambda number: cloud.preempt("trainer") if story.starts else None
    with pytest.raises(UserError, match=r"the slice is gone: lost \(PREEMPTED\)"):
        story.pod_run().once()


def test_a_laptop_that_is_offline_for_a_while(story: Story, cloud: Cloud) -> None:
    def trouble(number: int) -> None:
        if story.starts:
            cloud.order(fail="" if "looking again" in story.text else "network is unreachable")

    story.at_wait = trouble
    story.ends.write_text("")

    def stop_in_the_end(number: int) -> None:
        trouble(number)
        if "looking again" in story.text:
            run.workers.stop(60)

    story.at_wait = stop_in_the_end
    story.ends.write_text("wait\n0")
    run = story.pod_run()
    assert run.keep() == 0
    assert "network is unreachable" in story.text


def test_an_account_that_may_not_is_told_at_once(story: Story, cloud: Cloud) -> None:
    cloud.order(fail="PERMISSION_DENIED: Cloud TPU API has not been used in project my-project")
    with pytest.raises(GcloudError, match="PERMISSION_DENIED"):
        story.keep("0")
    assert story.waits == []
