"""A release in place of its run: the same answers, from one file, wherever it lies."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import tinypod
from fixtures import write_4x4
from releases import EXAMPLES, empty_shelf, export, train_run
from tinypod import cli
from tinypod import config as configs
from tinypod.cli import shared
from tinypod.errors import ConfigError, DataError, UserError
from tinypod.experiment import ExperimentConfig
from tinypod.runs import release
from tinypod.runs.checksums import flatten
from tinypod.runs.folder import Run
from tinypod.runs.load import load_weights
from tinypod.runs.release import KEY, Release, open_release, open_source, write_release
from tinypod.solve import refine

PUZZLE = "12..34.........."


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def exact(run: Path) -> Path:
    """In float32."""
    out = run.parent / "exact.safetensors"
    export(run, out, "--dtype", "float32")
    return out


@pytest.fixture(scope="module")
def rounded(run: Path) -> Path:
    """In bfloat16, with examples."""
    examples = run.parent / "examples.txt"
    examples.write_text("\n".join(EXAMPLES))
    out = run.parent / "rounded.safetensors"
    export(run, out, "--examples", str(examples))
    return out


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return empty_shelf(tmp_path, monkeypatch)


def command(*arguments: object) -> str:
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_in_float32_it_answers_as_the_run_to_the_bit(run: Path, exact: Path) -> None:
    ours, theirs = tinypod.load(exact), tinypod.load(run)
    assert (ours.step, ours.weights) == (theirs.step, theirs.weights)
    for one, other in zip(ours.solve_all(EXAMPLES), theirs.solve_all(EXAMPLES), strict=True):
        np.testing.assert_array_equal(one.grids, other.grids)
        np.testing.assert_array_equal(one.halt_probabilities, other.halt_probabilities)
    data = {"data.path": run.parent / "data"}
    assert tinypod.load(exact, data).evaluate() == theirs.evaluate()


def test_in_bfloat16_it_answers_as_the_run_with_rounded_weights(run: Path, rounded: Path) -> None:
    whole = load_weights(Run(run), [], "best")
    nearest = jax.tree.map(lambda x: np.asarray(x).astype("bfloat16").astype(np.float32), whole.params)
    expected = refine.refinements(whole.experiment, nearest, EXAMPLES)
    found = tinypod.load(rounded).solve_all(EXAMPLES)
    for one, other, plain in zip(found, expected, tinypod.load(run).solve_all(EXAMPLES), strict=True):
        np.testing.assert_array_equal(one.grids, other.grids)
        np.testing.assert_array_equal(one.halt_probabilities, other.halt_probabilities)
        assert (one.halt_probabilities != plain.halt_probabilities).any()
    tensors = load_file(rounded)
    assert tensors.keys() == flatten(whole.params).keys() >= {"z_init.H", "puzzle_table"}
    assert {str(x.dtype) for x in tensors.values()} == {"bfloat16"}


def test_on_cpus_it_computes_in_float32_unless_asked(tmp_path: Path) -> None:
    run = train_run(tmp_path, "model.dtype=bfloat16")
    export(run, tmp_path / "a.safetensors")
    opened = open_release(tmp_path / "a.safetensors")
    assert opened.read_config().model.dtype == "bfloat16"

    def dtype(*overrides: str) -> str:
        return load_weights(opened, list(overrides), "best", needs_data=False).experiment.config.model.dtype

    assert (dtype(), dtype("model.dtype=bfloat16")) == ("float32", "bfloat16")
    assert load_weights(Run(run), [], "best").experiment.config.model.dtype == "bfloat16"


def test_the_commands_take_a_file(run: Path, exact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exact.parent)
    assert command("solve", exact.name, PUZZLE) == command("solve", run, PUZZLE)
    data = f"data.path={run.parent / 'data'}"
    told = command("eval", exact.name, data, "--json")
    assert json.loads(told) == json.loads(command("eval", run, "--json"))
    held_out = command("solve", exact.name, data, "--number", 3)
    assert held_out == command("solve", run, "--number", 3)


def test_without_a_dataset_eval_says_what_to_give_and_solve_shows_an_example(rounded: Path, exact: Path) -> None:
    with pytest.raises(DataError, match=r"rounded\.safetensors is a release.*data\.path=FOLDER"):
        command("eval", rounded)
    with pytest.raises(DataError, match=r"data\.path=FOLDER"):
        tinypod.load(rounded).solve_held_out()
    for number, puzzle in enumerate(EXAMPLES):
        shown = command("solve", rounded, "--number", number)
        assert f"Example {number} of {rounded}" in shown
        assert shown.splitlines()[1:] == command("solve", rounded, puzzle).splitlines()
    assert command("solve", rounded) == command("solve", rounded, "--number", 0)
    assert tinypod.load(rounded).solve(number=1).answer == tinypod.load(rounded).solve(EXAMPLES[1]).answer
    with pytest.raises(UserError, match=r"--number 2: .* has 2 examples, numbered from 0"):
        command("solve", rounded, "--number", 2)


def test_what_it_says_of_itself(run: Path, rounded: Path) -> None:
    about, model = open_release(rounded).about, tinypod.load(rounded)
    scores = next(row for row in tinypod.load(run).metrics if "eval/exact_accuracy" in row and row["step"] == 5)
    assert about.scores == {name: value for name, value in scores.items() if name not in ("step", "time")}
    assert model.metrics == [{"step": 5, **about.scores}]
    assert (about.step, about.weights, about.examples) == (5, "ema", tuple(EXAMPLES))
    assert about.num_weights == sum(x.size for x in load_file(rounded).values())
    assert about.dataset == json.loads((run / "task.json").read_text())["dataset"]
    assert about.headline[0].name == "exact_accuracy"
    assert model.release == open_release(rounded)
    assert model.config.model == tinypod.load(run).config.model
    assert tinypod.load(rounded, {"model.H_cycles": 3}).config.model.H_cycles == 3
    with pytest.raises(UserError, match="is a release, and has no run folder"):
        _ = model.run
    assert tinypod.load(run).release is None


def test_a_release_has_one_checkpoint_and_one_kind_of_weights(rounded: Path) -> None:
    assert command("solve", rounded, PUZZLE, "--checkpoint", 5, "--weights", "ema")
    with pytest.raises(UserError, match=r"--checkpoint 4: .* of step 5 alone"):
        command("solve", rounded, PUZZLE, "--checkpoint", 4)
    for asked in (("--weights", "live"), ("eval.weights=live",)):
        with pytest.raises(UserError, match=r"--weights live: .* of ema weights alone"):
            command("solve", rounded, PUZZLE, *asked)
    with pytest.raises(ConfigError, match=r"model\.hidden_size: a trained model is used as it is"):
        command("solve", rounded, PUZZLE, "model.hidden_size=8")


def test_a_name_is_a_shipped_release_and_a_run_of_that_name_goes_first(run: Path, rounded: Path, shelf: Path) -> None:
    shutil.copyfile(rounded, shelf / "small.safetensors")
    found = open_source("small")
    assert isinstance(found, Release)
    assert (str(found), found.path) == ("small", shelf / "small.safetensors")
    assert "Example 0 of small" in command("solve", "small")
    assert tinypod.load("small").solve(PUZZLE).answer == tinypod.load(rounded).solve(PUZZLE).answer
    Path("small").mkdir()  # no run: does not stand in the way
    assert isinstance(open_source("small"), Release)
    assert open_source("./small") == Run(Path("small"))
    shutil.copyfile(run / "config.yaml", "small/config.yaml")
    assert open_source("small") == Run(Path("small"))


def test_an_unknown_name_is_answered_with_those_that_are_shipped(rounded: Path, shelf: Path) -> None:
    for name in ("sudoku", "runs/sudoku"):
        with pytest.raises(UserError, match=f"{name} is not a run folder.*none is shipped.*expected a run folder, its"):
            command("solve", name)
    for name in ("small", "other"):
        shutil.copyfile(rounded, shelf / f"{name}.safetensors")
    with pytest.raises(UserError, match=r"no release of that name .shipped are other, small.*or a release file"):
        tinypod.load("sudoku")
    with pytest.raises(UserError, match=r"gone\.safetensors: no such file; `tinypod weights export RUN"):
        tinypod.load("gone.safetensors")
    with pytest.raises(UserError, match=r"gs://b/a\.safetensors: .* copy it here first"):
        tinypod.load("gs://b/a.safetensors")
    assert "the name of a release" in " ".join(command("solve", "--help").replace("│", " ").split())


def test_the_shell_completes_them(rounded: Path, shelf: Path) -> None:
    shutil.copyfile(rounded, shelf / "small.safetensors")
    shutil.copyfile(rounded, "mine.safetensors")
    Path("notes.yaml").write_text("")
    assert shared.complete_trained("") == ["small", "mine.safetensors"]
    assert shared.complete_trained("m") == ["mine.safetensors"]
    for path in ("runs/one", "runs/two"):
        Path(path).mkdir(parents=True)
        (Path(path) / "config.yaml").write_text("")
    assert shared.complete_trained("") == ["small", "runs/one", "runs/two"]


def test_a_file_cut_short_is_refused(rounded: Path, tmp_path: Path) -> None:
    content, cut = rounded.read_bytes(), tmp_path / "cut.safetensors"
    header = int.from_bytes(content[:8], "little")
    for length in (0, 5, header // 2, header + 8, len(content) - 1):
        cut.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"cut\.safetensors: not a release, or cut short .*export it again"):
            tinypod.load(cut)


def test_a_file_of_another_kind_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.yaml is a file, and a run is a folder; a release is .*\.safetensors"):
        command("solve", run / "config.yaml")
    other = tmp_path / "other.safetensors"
    other.write_text("steps: 5\n")
    with pytest.raises(UserError, match=r"other\.safetensors: not a release, or cut short"):
        command("solve", other)
    save_file({"head": np.zeros(2, np.float32)}, other, {"format": "pt"})
    with pytest.raises(UserError, match=r"other\.safetensors: safetensors, but not a release.*weights import"):
        command("solve", other)
    for text, says in (
        ("{", "metadata are not those of a release"),
        ("[]", "metadata are not those of a release"),
        ('{"version": 1}', r"not those of a release .tinypod: Field required.*export it again"),
        ('{"version": 2}', "a release of version 2, and this tinypod reads version 1; update"),
    ):
        save_file({"head": np.zeros(2, np.float32)}, other, {KEY: text})
        with pytest.raises(UserError, match=rf"other\.safetensors: .*{says}"):
            command("solve", other)


def test_damaged_unknown_and_missing_tensors_are_named(rounded: Path, tmp_path: Path) -> None:
    tensors, about, path = load_file(rounded), open_release(rounded).about, tmp_path / "changed.safetensors"
    content = bytearray(rounded.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"changed\.safetensors: its weights are not as they were written"):
        tinypod.load(path).solve(PUZZLE)
    changed = {name: value for name, value in tensors.items() if name != "head"} | {"tail": tensors["head"]}
    changed["q_head.bias"] = changed["q_head.bias"][:1]
    write_release(path, about, changed)
    with pytest.raises(UserError, match="not the weights of this model") as refused:
        tinypod.load(path).solve(PUZZLE)
    for line in (
        str(path),
        "export the release again",
        "missing from the file: head",
        "in the file, but not in this model: tail",
        "q_head.bias: the file has (1,), the config and its dataset (2,)",
    ):
        assert line in str(refused.value)
    write_release(path, about, tensors | {"head": np.zeros(3, np.int8)})
    with pytest.raises(UserError, match=r"changed\.safetensors: head is I8, expected one of BF16, F32, F16"):
        tinypod.load(path).solve(PUZZLE)


def test_a_config_of_another_version_names_the_file_and_the_version(rounded: Path, tmp_path: Path) -> None:
    about, path = open_release(rounded).about, tmp_path / "new.safetensors"
    config = about.config | {"model": about.config["model"] | {"brand_new": 1}}
    write_release(path, about.model_copy(update={"config": config, "tinypod": "9.9"}), load_file(rounded))
    with pytest.raises(ConfigError, match=r"(?s)new\.safetensors, made by tinypod 9\.9.*model\.brand_new: unknown key"):
        tinypod.load(path)


def test_a_dataset_of_another_shape_is_refused(exact: Path, tmp_path: Path) -> None:
    tinypod.make_sudoku(tmp_path / "six", box=(2, 3), clues=20, train_size=2, test_size=2)
    with pytest.raises(
        UserError, match=r"(?s)give a dataset \(data\.path\) of puzzles like.*the file has .*, the config"
    ):
        command("eval", exact, f"data.path={tmp_path / 'six'}")
    write_4x4(tmp_path / "other", test=3)
    assert json.loads(command("eval", exact, f"data.path={tmp_path / 'other'}", "--json"))["count"] == 3


@pytest.mark.parametrize("name", sorted(release.shipped()))
def test_what_is_shipped_is_small_and_solves_its_examples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a run folder of that name would go first
    opened = open_release(release.shipped()[name])
    assert opened.path.stat().st_size <= 16e6
    assert release.read_tensors(opened)
    assert opened.about.examples
    for refinement in tinypod.load(name).solve_all(
        opened.about.examples, halt_steps=8
    ):  # enough for each, with steps to spare
        assert refinement.solved
        assert refinement.halted_at


def test_a_sudoku_comes_with_the_package() -> None:
    assert "sudoku" in release.shipped()


def test_the_sudoku_was_trained_by_its_recipe() -> None:
    released = open_release(release.shipped()["sudoku"]).read_config()
    recipe = configs.load("trm/sudoku_fast", [], ExperimentConfig)
    for key in ("model", "task", "optimizer", "steps", "batch_size", "ema_decay"):
        assert getattr(released, key) == getattr(recipe, key), key
    assert released.data.sampling == recipe.data.sampling
