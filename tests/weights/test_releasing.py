"""What goes into a release, and what is refused before anything is written."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from releases import EXAMPLES, export, train_run
from tinypod.errors import DataError, UserError
from tinypod.runs import storage
from tinypod.runs.folder import Run
from tinypod.runs.load import load_weights
from tinypod.runs.release import open_release
from tinypod.solve.examples import example
from tinypod.weights import releasing


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("releasing")
    return train_run(folder, "log.wandb={project: secret, mode: disabled}", f"compile_cache={folder}/cache")


def test_nothing_of_the_machine_is_in_it(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    assert str(run.parent).encode() not in content
    assert b"secret" not in content
    config = open_release(tmp_path / "a.safetensors").read_config()
    assert (config.data.path, config.compile_cache, config.log.wandb) == ("data", "auto", None)


def test_the_same_run_gives_the_same_file(run: Path, tmp_path: Path) -> None:
    first = export(run, tmp_path / "a.safetensors")
    export(run, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert "step 5, ema weights" in " ".join(first.split())
    assert "weights in bfloat16" in first


def test_kinds_of_weights_and_dtypes(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    for dtype, width in (("float32", 4), ("float16", 2), ("bfloat16", 2)):
        export(run, out, "--dtype", dtype)
        tensors, whole = load_file(out), releasing.convert(load_weights(Run(run), [], "best").params, "float32")
        assert {x.itemsize for x in tensors.values()} == {width}
        for name, value in tensors.items():
            np.testing.assert_array_equal(value, whole[name].astype(dtype))
    export(run, out, "--dtype", "float32", "--weights", "live")
    about = open_release(out).about
    assert (about.weights, about.scores) == ("live", {})  # training scored the averages
    live = releasing.convert(load_weights(Run(run), [], "best", "live").params, "float32")
    np.testing.assert_array_equal(load_file(out)["head"], live["head"])


def test_values_that_a_dtype_cannot_hold_are_refused() -> None:
    assert releasing.convert({"a": np.array([1e5], np.float32)}, "bfloat16")
    with pytest.raises(UserError, match=r"--dtype float16: layers\.a has values .* too large"):
        releasing.convert({"layers": {"a": np.array([1e5], np.float32)}}, "float16")
    with pytest.raises(UserError, match=r"--dtype float32: b has values that are not finite"):
        releasing.convert({"b": np.array([np.nan], np.float32)}, "float32")


def test_a_write_that_fails_leaves_the_old_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.safetensors"
    export(run, out)
    before = out.read_bytes()
    monkeypatch.setattr(storage.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    with pytest.raises(OSError, match="No space"):
        export(run, out, "--dtype", "float32")
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "0 puzzles, expected 1 to 8"),
        ("\n".join(EXAMPLES * 5), "10 puzzles, expected 1 to 8, one a line"),
        (f"{EXAMPLES[0]}\n\n1234", r"examples\.txt:3: puzzle has 4 characters, expected 16"),
        ("11" + "." * 14, r"examples\.txt:1: puzzle has 1 at row 1, column 1 and again"),
        (None, r"examples\.txt: cannot be read: No such file"),
    ],
)
def test_examples_are_checked(run: Path, tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "examples.txt").write_text(text)
    with pytest.raises(UserError, match=says):
        export(run, tmp_path / "a.safetensors", "--examples", str(tmp_path / "examples.txt"))
    assert not (tmp_path / "a.safetensors").exists()


def test_examples_are_written_one_way(run: Path, tmp_path: Path) -> None:
    (tmp_path / "e.txt").write_text(EXAMPLES[0].replace(".", "0") + "\n")
    export(run, tmp_path / "a.safetensors", "--examples", str(tmp_path / "e.txt"))
    assert open_release(tmp_path / "a.safetensors").about.examples == (EXAMPLES[0],)


def test_options_of_other_formats_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.bin: a release is a file called NAME\.safetensors"):
        export(run, tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"gs://bucket/a\.safetensors: a release is written to a local file"):
        export(run, Path("gs://bucket/a.safetensors"))
    with pytest.raises(UserError, match="--base is for --format peft"):
        export(run, tmp_path / "a.safetensors", "--base", str(tmp_path))
    with pytest.raises(UserError, match="--examples is for --format release"):
        export(run, tmp_path / "a.pt", "--format", "packed", "--examples", "x")
    with pytest.raises(UserError, match="choose --format release"):
        export(run, tmp_path / "a.pt", "--format", "hugging_face")


def test_what_a_newer_version_says_of_a_dataset_is_an_error_and_no_crash() -> None:
    with pytest.raises(DataError, match=r"cannot be read \(.*: .*\): it may be of a newer tinypod; update tinypod"):
        releasing.described({"kind": "sudoku", "colours": 4})


def test_a_release_of_other_puzzles_has_no_sudoku_to_show(run: Path, tmp_path: Path) -> None:
    """Nothing knows their rules."""
    export(run, tmp_path / "a.safetensors")
    opened = open_release(tmp_path / "a.safetensors")
    plain = opened.about.dataset | {"kind": "plain", "box": None}
    info = releasing.described(plain)
    with pytest.raises(UserError, match="examples are Sudokus; this run's puzzles are of kind 'plain'"):
        releasing.read_examples(tmp_path / "x", info)
    other = type(opened)(opened.path, opened.about.model_copy(update={"dataset": plain}))
    with pytest.raises(UserError, match="has no examples, and its puzzles are of kind 'plain'; give a puzzle"):
        example(other, 0)
