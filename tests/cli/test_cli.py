"""The command line as a user meets it: what works, and what it says when something cannot."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fixtures import CONFIGS, tiny_config, write_4x4
from tinypod import cli, training
from tinypod.cli import shared
from tinypod.data import puzzles, sudoku, sudoku_generator
from tinypod.errors import UserError
from tinypod.runs.folder import Run

runner = CliRunner()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    data = write_4x4(folder / "data", num_sources=2)
    training.train(tiny_config(data), Run(folder / "run"), Console(quiet=True))
    return folder / "run"


def ok(*arguments: object) -> str:
    result = runner.invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def refused(*arguments: object) -> str:
    """The message of a user's error; anything else is a bug."""
    result = runner.invoke(cli.app, [str(a) for a in arguments])
    if result.exit_code == 2 and not isinstance(result.exception, UserError | OSError):
        return result.output  # the parser's own
    assert isinstance(result.exception, UserError | OSError), result.exception
    return str(result.exception)


def test_help_teaches() -> None:
    for command in ("train", "eval", "solve", "data", "weights"):
        assert command in ok("--help")
    assert "resume" in ok("train", "--help")
    assert "--halt-steps" in ok("eval", "--help")
    assert "--generate" in ok("data", "sudoku", "--help")
    assert "--install-completion" in ok("--help")
    for command in (["-h"], ["train", "-h"], ["data", "-h"], ["data", "sudoku", "-h"], ["study", "run", "-h"]):
        assert "Usage" in ok(*command)
    assert "tinypod 0" in ok("--version")


def test_eval_prints_each_source_and_more_steps(trained: Path) -> None:
    text = ok("eval", trained)
    assert "source0" in text
    assert "source1" in text
    assert " 21 " in text
    assert '"weights": "live"' in ok("eval", trained, "--halt-steps", 9, "--json", "--weights", "live", "--limit", 5)
    assert "9 steps each" in " ".join(ok("eval", trained, "--halt-steps", 9).split())  # long paths break the title
    more = ("--views", 2, "--trajectories", 2, "--noise", 0.5, "--noise-at", "every_step", "--choose", "confident")
    text = " ".join(ok("eval", trained, *more).split())
    assert "2 views, 2 trajectories, noise 0.5, at every step, the most confident" in text
    assert "cost in steps" in text
    assert json.loads(ok("eval", trained, *more, "--json"))["cost/source1"] == 3 * 2 * 2
    other = write_4x4(trained.parent / "other", test=5, num_sources=2)
    assert '"count": 5.0' in ok("eval", trained, f"data.path={other}", "--json", "--checkpoint", "latest")


def test_solve_takes_characters_files_and_held_out_puzzles(trained: Path, tmp_path: Path) -> None:
    assert "step 1" in ok("solve", trained)
    assert "step 1" in ok("solve", trained, "12..34..........", "--halt-steps", 4)
    text = ok("solve", trained, "12..34..........", "--views", 3, "--choose", "vote")
    assert "3 views, by vote: 9 steps of the model for a puzzle" in text
    assert "steps of the model" not in ok("solve", trained, "12..34..........")
    listed = tmp_path / "list.txt"
    listed.write_text("12..34..........\n\n....12..34......\n")
    assert "of 2" in ok("solve", trained, listed, "--svg", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert "not a file, and not a puzzle" in refused("solve", trained, "123")
    assert "1 at row 1, column 1 and again" in refused("solve", trained, "11..............")
    listed.write_text("12..34..........\n12x\n")
    assert f"{listed}:2" in refused("solve", trained, listed)
    listed.write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in refused("solve", trained, listed)
    assert "there are 21 held-out puzzles" in refused("solve", trained, "--number", 21)
    assert "not of a language model" in refused("generate", trained, "hello")


def test_wrong_arguments_are_named(trained: Path, tmp_path: Path) -> None:
    assert "no config file at" in refused("train", tmp_path / "none.yaml")
    assert "is not a run folder" in refused("eval", tmp_path)
    assert "no checkpoint of step 7; there are: 5, 10" in refused("eval", trained, "--checkpoint", "7")
    assert "expected `best`, `latest` or a step" in refused("eval", trained, "--checkpoint", "newest")
    assert "'both' is not one of" in refused("eval", trained, "--weights", "both")
    assert "No such option" in refused("train", "x.yaml", "--sped")
    assert "no dataset at" in refused("train", CONFIGS / "demo.yaml", f"data.path={tmp_path}", "--run", tmp_path / "r")
    assert "all the same without noise; set noise" in refused("eval", trained, "--trajectories", 4)
    assert "set trajectories" in refused("solve", trained, "--noise", 0.5)
    assert "no split 'valid'" in refused("eval", trained, "--split", "valid")
    (tmp_path / "file").write_text("")
    data = f"data.path={trained.parent / 'data'}"
    assert "file is a file, and a run is a folder" in refused("train", "demo", data, "--run", tmp_path / "file")
    assert "file is a file, and a run is a folder" in refused("eval", tmp_path / "file")
    nowhere = tmp_path / "nowhere"
    assert f"there is no folder {nowhere}" in refused("solve", tmp_path, "--svg", nowhere / "a.svg")


@pytest.mark.parametrize(
    ("written", "taught"),
    [
        (["--steps", "100"], "without dashes: steps=100"),
        (["--steps=100"], "without dashes: steps=100"),
        (["--lr", "1e-3"], "without dashes: optimizer.learning_rate=1e-3"),
        (["--learning-rate", "1e-3"], "without dashes: optimizer.learning_rate=1e-3"),
        (["--every-steps", "5"], "eval.every_steps=5 or checkpoint.every_steps=5 or log.every_steps=5"),
        (["--seed"], "without dashes: seed=..."),
    ],
)
def test_a_config_key_as_an_option_is_taught(written: list[str], taught: str) -> None:
    for command in (["train", "demo"], ["plan", "demo", "--slice", "v4-8"], ["study", "run", "studies/demo"]):
        message = refused(*command, *written)
        assert message.startswith(f"{written[0].split('=')[0]} is not an option")
        assert message.endswith(taught)
    for command in (("demo",), ("configs", "demo")):
        assert "without dashes: steps=100" in refused(*command, "--steps", "100")
    assert "--steps" in ok("check", "-h")  # there it is one
    assert "Missing argument" in refused("train")


def test_configs_and_runs_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/one", "runs/two", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.yaml").write_text("")
    (tmp_path / "mine.yaml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert "trm/sudoku_mlp" in shared.complete_config("trm/")
    assert shared.complete_config("mi") == ["mine.yaml"]
    assert shared.complete_config("runs/") == ["runs/one/", "runs/two/"]
    assert shared.complete_run("") == ["runs/one"]
    assert shared.complete_run("o") == ["other/"]
    script = {"_TINYPOD_COMPLETE": "complete_bash", "COMP_WORDS": "tinypod train dem", "COMP_CWORD": "2"}
    done = runner.invoke(cli.app, [], env=script, prog_name="tinypod")
    assert done.output.split() == ["demo"]


def test_quiet_prints_one_last_line(trained: Path, tmp_path: Path) -> None:
    config = trained / "config.yaml"
    text = ok("train", config, "steps=12", "optimizer.schedule.warmup_steps=20", "--run", tmp_path / "run", "--quiet")
    assert text.startswith(f"{tmp_path / 'run'}: step 12 of 12, best exact ")
    assert len(text.splitlines()) == 1
    assert "warning: optimizer.schedule.warmup_steps=20 is longer" in ok(
        "train", config, "steps=14", "optimizer.schedule.warmup_steps=20", "--run", tmp_path / "run"
    )


def test_a_dry_run_shows_everything_and_writes_nothing(trained: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.parent.rglob("*")}
    config, run = trained / "config.yaml", tmp_path / "run"
    text = ok("train", config, "steps=1e3", "--run", run, "--dry-run")
    assert f"# writes: {run}/ (a new run)\n" in text
    assert "# steps:  0 to 1,000\n" in text
    assert text.endswith("# dry run: nothing was written\n")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.parent.rglob("*")} == before
    assert "one run; several values" in refused("train", config, "seed=0,1", "--dry-run")
    assert "leave out --coordinator" in refused("train", config, "--dry-run", "--coordinator", "h:1")


def test_data_sudoku_generates(tmp_path: Path) -> None:
    out = tmp_path / "data"
    flags = ("--generate", "--box", "2x3", "--clues", "14", "--train-size", 30, "--test-size", 20)
    assert "30 train, 20 test" in ok("data", "sudoku", out, *flags)
    info = puzzles.read_info(out)
    splits = {name: puzzles.read_split(out, info, name) for name in info.splits}
    questions = np.concatenate([split.inputs - 1 for split in splits.values()])
    assert len(set(sudoku.signatures(questions, (2, 3)).tolist())) == 50  # no symmetric copies, within or across
    assert ((questions > 0).sum(axis=1) >= 14).all()
    assert "already holds a dataset" in refused("data", "sudoku", out, *flags)
    again = tmp_path / "again"
    ok("data", "sudoku", again, *flags)
    assert (again / "train.npz").read_bytes() == (out / "train.npz").read_bytes()


def test_data_sudoku_reads_csvs(tmp_path: Path) -> None:
    made = sudoku_generator.generate((3, 3), 12, seed=1)
    lines = [
        f"s{i % 2},{sudoku.format_puzzle(q)},{sudoku.format_puzzle(a)},{i}"
        for i, (q, a) in enumerate(zip(*made[:2], strict=True))
    ]
    for name, part in (("train", lines[:8]), ("test", lines[8:])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["source,question,answer,rating", *part]) + "\n")
    csvs = ("--train-csv", tmp_path / "train.csv", "--test-csv", tmp_path / "test.csv")
    assert "5 train, 4 test" in ok("data", "sudoku", tmp_path / "d", *csvs, "--train-size", 5)
    info = puzzles.read_info(tmp_path / "d")
    split = puzzles.read_split(tmp_path / "d", info, "test")
    by_question = {
        sudoku.format_puzzle(q): (sudoku.format_puzzle(a), i) for i, (q, a) in enumerate(zip(*made[:2], strict=True))
    }
    for row in range(len(split)):
        answer, i = by_question[sudoku.format_puzzle(split.inputs[row] - 1)]
        assert sudoku.format_puzzle(split.labels[row] - 1) == answer
        assert (info.sources[split.sources[row]], split.ratings[row]) == (f"s{i % 2}", i)
    assert "give both" in refused("data", "sudoku", tmp_path / "e", "--train-csv", tmp_path / "train.csv")
    assert "leave out" in refused("data", "sudoku", tmp_path / "e", *csvs, "--generate")
    assert "--clues goes with --generate" in refused("data", "sudoku", tmp_path / "e", *csvs, "--clues", 30)
    assert "--clues 40: with --box 2x3 a grid has 36 cells; expected at most 35" in refused(
        "data", "sudoku", tmp_path / "e", "--generate", "--box", "2x3", "--clues", 40
    )
    for clues, said in [("36-24", "write 24-36"), ("24-", "or a range, like 24-36"), ("0", "expected a number")]:
        assert said in refused("data", "sudoku", tmp_path / "e", "--generate", "--clues", clues)
    assert "expected rows x columns" in refused("data", "sudoku", tmp_path / "e", "--generate", "--box", "three")
    bad = [*lines[:3], lines[3].replace(sudoku.format_puzzle(made.questions[3]), "." * 81)]
    (tmp_path / "train.csv").write_text("\n".join(["source,question,answer,rating", *bad]) + "\n")
    assert "train.csv:5" in refused("data", "sudoku", tmp_path / "e", *csvs, "--train-size", 4)
    assert not (tmp_path / "e").exists()


def test_weights_go_out_and_come_in(trained: Path, tmp_path: Path) -> None:
    ok("weights", "export", trained, tmp_path / "w.pt")
    config = trained / "config.yaml"
    ok("weights", "import", tmp_path / "w.pt", config, tmp_path / "run")
    ok("weights", "export", tmp_path / "run", tmp_path / "again.pt", "--weights", "live")
    import torch

    a, b = (torch.load(tmp_path / name, weights_only=True) for name in ("w.pt", "again.pt"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert (
        ok("eval", tmp_path / "run", "--json").split('"weights"')[1]
        == ok("eval", trained, "--json").split('"weights"')[1]
    )
    assert "another model" in refused(
        "weights", "import", tmp_path / "w.pt", config, tmp_path / "x", "model.num_layers=3"
    )
    assert "already holds a run" in refused("weights", "import", tmp_path / "w.pt", config, tmp_path / "run")


def test_an_error_is_a_message_on_stderr_and_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["tinypod", "eval", "nowhere"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("error: nowhere is not a run folder")
    assert told.count("\n") == 1
