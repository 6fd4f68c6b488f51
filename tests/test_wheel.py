"""What `pip install tinypod` gives: the wheel alone, in an environment of its own, outside the checkout.

Only tinypod is installed there. Its dependencies are those of the tests, reached through a path: downloading all of JAX
again would test nothing more (`test_dependencies.py` asks that every import is declared)."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

from releases import EXAMPLES, export, train_run

ROOT = Path(__file__).parents[1]
SMALL = ("batch_size=16", "model.hidden_size=32", "model.unroll=false", "eval.every_steps=2", "log.tensorboard=false")

pytestmark = pytest.mark.slow


def succeed(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is published, with a release `small` in it."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copyfile(ROOT / name, folder / name)
    without = shutil.ignore_patterns("__pycache__")
    package = shutil.copytree(ROOT / "src", folder / "src", ignore=without) / "tinypod"
    export(train_run(tmp_path_factory.mktemp("small")), package / "releases" / "small.safetensors")
    return folder


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment with nothing but the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    succeed(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, source, cwd=folder)
    [wheel] = folder.glob("tinypod-*.whl")
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    succeed(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    [packages] = (folder / "env").glob("lib/python*/site-packages")
    # A path in a .pth file is appended, and .pth files in it are not read: an editable tinypod there is not seen.
    elsewhere = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in elsewhere))
    return python.parent


def as_on_a_users_machine() -> dict[str, str]:
    ours = ("PYTHON", "XLA_FLAGS", "JAX_", "TINYPOD_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {"COLUMNS": "80"}


def test_the_demo_and_the_recipes_work_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    env, tinypod = as_on_a_users_machine(), installed / "tinypod"
    where = succeed(installed / "python", "-c", "import tinypod; print(tinypod.__file__)", cwd=tmp_path, env=env)
    assert Path(where.strip()).is_relative_to(installed.parent)

    shown = succeed(tinypod, "demo", "steps=4", *SMALL, cwd=tmp_path, env=env)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "runs"}
    assert "steps 0 to 4" in shown
    assert "of 500 held-out puzzles" in shown
    assert "step 1:" in shown
    assert "What to try next" in shown
    assert max(map(len, shown[shown.index("Held-out puzzle") :].splitlines())) <= 80
    weights = sorted((tmp_path / "runs" / "demo" / "checkpoints").rglob("*"))
    made = {path: path.stat().st_mtime_ns for path in [tmp_path / "data" / "demo" / "dataset.json", *weights]}

    again = succeed(tinypod, "demo", "steps=4", *SMALL, cwd=tmp_path, env=env)
    assert "nothing left to do at step 4" in again
    assert again[again.index("Held-out puzzle") :] == shown[shown.index("Held-out puzzle") :]
    assert {path: path.stat().st_mtime_ns for path in made} == made
    further = succeed(tinypod, "demo", "steps=6", *SMALL, cwd=tmp_path, env=env)
    assert "steps 4 to 6" in further

    succeed(tinypod, "train", "demo", "steps=2", *SMALL, "--run", "runs/other", cwd=tmp_path, env=env)
    listed = succeed(tinypod, "configs", cwd=tmp_path, env=env)
    recipes = ROOT / "src" / "tinypod" / "configs"
    for path in recipes.rglob("*.yaml"):
        name = path.relative_to(recipes).with_suffix("").as_posix()
        assert (f" {name} " in listed) == (name != "base"), name
    for name, said in (
        ("trm/sudoku_mlp", "data.path: no dataset"),
        ("sudoku_mpl", "did you mean the recipe `trm/sudo"),
    ):
        refused = subprocess.run([tinypod, "train", name], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert refused.returncode == 2
        assert said in refused.stderr


def test_a_shipped_release_solves_a_puzzle_without_a_run(installed: Path, tmp_path: Path) -> None:
    env, tinypod = as_on_a_users_machine(), installed / "tinypod"
    shown = succeed(tinypod, "solve", "small", EXAMPLES[0], cwd=tmp_path, env=env)
    assert "step 3" in shown
    assert "made up here" in succeed(tinypod, "solve", "small", cwd=tmp_path, env=env)
    assert list(tmp_path.iterdir()) == []


def test_the_archive_of_sources_carries_releases_and_recipes(source: Path, tmp_path: Path) -> None:
    backend = tmp_path / "backend"
    succeed(sys.executable, "-m", "pip", "install", "--target", backend, "hatchling>=1.27", cwd=tmp_path)
    program = f"from hatchling.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    name = succeed(
        sys.executable, "-c", program, cwd=source, env=os.environ | {"PYTHONPATH": str(backend)}
    ).splitlines()[-1]
    with tarfile.open(tmp_path / name) as archive:
        carried = {member.partition("/")[2] for member in archive.getnames()}
    assert "src/tinypod/releases/small.safetensors" in carried
    assert "src/tinypod/configs/demo.yaml" in carried
