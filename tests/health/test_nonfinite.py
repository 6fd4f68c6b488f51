"""Steps that are not finite: skipped and counted, rolled back after too many in a row, and at last given up."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fixtures import tiny_config, write_4x4
from poison import poisoned
from test_training import assert_same_states, state_at
from tinypod import experiment, tasks, training
from tinypod.cluster.agreement import Cluster
from tinypod.errors import NonFiniteError, UserError
from tinypod.experiment import NonFiniteConfig
from tinypod.health import goodput
from tinypod.health import nonfinite as rollback
from tinypod.runs.folder import Run
from tinypod.runs.metrics import MetricsLog
from tinypod.runs.saver import about, open_checkpoints

SETTINGS = ("steps=12", "checkpoint.every_steps=4", "checkpoint.keep_last=9", "eval.every_steps=null")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("rollback") / "data")


def trained(data: Path, folder: Path, *overrides: str) -> str:
    console = Console(file=StringIO(), width=200)
    training.train(tiny_config(data, *SETTINGS, *overrides), Run(folder), console)
    return console.file.getvalue()


def rollbacks(folder: Path, after: int = 3, most: int = 3) -> rollback.Rollbacks:
    return rollback.Rollbacks(folder, NonFiniteConfig(rollback_after=after, max_rollbacks=most), Cluster(), 1.0)


def test_steps_in_a_row_are_counted_across_logs(tmp_path: Path) -> None:
    noted = rollbacks(tmp_path)
    assert noted.note(0, [False, True, True]) is None
    assert noted.note(3, [True, True, False]) == rollback.BadSteps(2, 5)
    assert rollbacks(tmp_path).note(0, [True, True, False, True, True]) is None


def test_batches_have_numbers_that_leaving_out_moves_up(tmp_path: Path) -> None:
    kept = rollbacks(tmp_path)
    kept.add(rollback.BadSteps(101, 110), 90)  # the batches 100 to 109
    assert kept.skipped == [(100, 10)]
    kept.add(rollback.BadSteps(99, 102), 90)  # the batches 98, 99, 110 and 111
    assert kept.skipped == [(100, 10), (98, 4)]
    again = rollbacks(tmp_path)
    assert again.skipped == kept.skipped
    assert [again.number(step) for step in (97, 98, 99)] == [97, 112, 113]
    assert again.allowed
    assert not rollbacks(tmp_path, most=2).allowed


def test_a_damaged_list_is_told(tmp_path: Path) -> None:
    (tmp_path / rollback.FILE).write_text('[{"first_batch": 3}]')
    with pytest.raises(UserError, match=r"rollbacks\.json: not a list of rollbacks"):
        rollbacks(tmp_path)


def test_a_few_bad_steps_are_skipped_and_counted(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.KINDS, "puzzle", poisoned(tasks.KINDS["puzzle"], {5, 6}))
    trained(data, tmp_path / "run", "nonfinite.rollback_after=3")
    rows = {row["step"]: row for row in MetricsLog(tmp_path / "run").read() if "train/loss" in row}
    assert [step for step, row in rows.items() if "train/skipped" in row] == [6, 8]
    assert sum(row.get("train/skipped", 0) for row in rows.values()) == 2
    assert all(row["train/loss"] > 0 for row in rows.values())
    assert not (tmp_path / "run" / rollback.FILE).exists()


def test_a_rolled_back_run_ends_as_if_the_bad_batches_had_never_been(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches 5, 6 and 7 are NaN: back from step 8 to 4, and on with 4, 8, 9. The reference leaves them out at once."""
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / rollback.FILE).write_text(json.dumps([{"first_batch": 5, "batches": 3}]))
    trained(data, tmp_path / "reference")
    monkeypatch.setitem(tasks.KINDS, "puzzle", poisoned(tasks.KINDS["puzzle"], {5, 6, 7}))
    output = trained(data, tmp_path / "run", "nonfinite.rollback_after=3")
    assert "steps 6 to 8 were not finite: back from step 8 to step 4, their 3 batches are left out" in output
    assert_same_states(*(state_at(data, tmp_path / name, 12) for name in ("reference", "run")))
    rows = MetricsLog(tmp_path / "run").read()
    assert [row["step"] for row in rows if "train/loss" in row] == [2, 4, 6, 8, 10, 12]
    assert [row["health/rolled_back_from_step"] for row in rows if "health/batches_left_out" in row] == [8]
    assert goodput.summarise(tmp_path / "run").seconds["lost"] > 0


def test_a_state_that_cannot_be_saved_by_rollbacks_ends_the_run(data: Path, tmp_path: Path) -> None:
    """A rate of 1e30 breaks the weights at the first step, whatever the batch."""
    with pytest.raises(NonFiniteError, match=r"after 2 rollbacks .*of step 0\. Lower optimizer\.learning_rate"):
        trained(
            data,
            tmp_path / "run",
            "optimizer.learning_rate=1e30",
            "nonfinite={rollback_after: 2, max_rollbacks: 2}",
            "log.every_steps=1",
        )
    assert len(json.loads((tmp_path / "run" / rollback.FILE).read_text())) == 2
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_no_checkpoint_from_among_bad_steps_takes_the_place_of_a_good_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves every 2 steps, two are kept, six bad steps: the one of step 4 must still be there."""
    monkeypatch.setitem(tasks.KINDS, "puzzle", poisoned(tasks.KINDS["puzzle"], set(range(5, 11))))
    few = ("nonfinite.rollback_after=6", "checkpoint.every_steps=2", "checkpoint.keep_last=2", "log.every_steps=1")
    assert "back from step 12 to step 4" in trained(data, tmp_path / "run", *few)  # which knew of 11 while it took 12


@pytest.mark.slow
def test_a_rollback_to_the_beginning_keeps_weights_that_were_given(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(data, *SETTINGS)
    built = experiment.build(config)
    state = built.init()
    state = state._replace(params=state.params | {"head": state.params["head"] * 0 + 7})
    checkpoints = open_checkpoints(Run(tmp_path / "run"), built, {})
    checkpoints.save(state, about(built))
    checkpoints.close()
    monkeypatch.setitem(tasks.KINDS, "puzzle", poisoned(tasks.KINDS["puzzle"], {0, 1}))
    trained(data, tmp_path / "run", "nonfinite.rollback_after=2", "log.every_steps=1", "optimizer.learning_rate=0.0")
    assert (state_at(data, tmp_path / "run", 12)["params.head"] == 7).all()
