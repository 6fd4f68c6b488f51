import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from fixtures import info_4x4, split_4x4, write_4x4
from tinypod.data import puzzles
from tinypod.errors import DataError


def test_a_dataset_reads_back(tmp_path: Path) -> None:
    folder = write_4x4(tmp_path / "data", train=7, test=3, num_sources=2)
    info = puzzles.read_info(folder)
    split, expected = puzzles.read_split(folder, info, "train"), split_4x4(7, 1, 2)
    for field in puzzles.FIELDS:
        assert np.array_equal(getattr(split, field), getattr(expected, field)), field
    assert (info.splits["train"].rows, info.splits["test"].rows) == (7, 3)


def test_a_dataset_is_not_overwritten(tmp_path: Path) -> None:
    folder = write_4x4(tmp_path / "data")
    with pytest.raises(DataError, match="already holds a dataset"):
        write_4x4(folder)


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "swap"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    folder = write_4x4(tmp_path / "data")
    info, path = puzzles.read_info(folder), folder / "train.npz"
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        path.write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])
    elif damage == "swap":
        path.write_bytes((folder / "test.npz").read_bytes())
    else:
        path.unlink()
    with pytest.raises(DataError, match=str(path)):
        puzzles.read_split(folder, info, "train")


def test_missing_folders_and_splits_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no dataset at .*nowhere.*tinypod data sudoku"):
        puzzles.read_info(tmp_path / "nowhere")
    folder = write_4x4(tmp_path / "data")
    with pytest.raises(DataError, match="no split 'valid'; it has train, test"):
        puzzles.read_split(folder, puzzles.read_info(folder), "valid")
    (folder / "dataset.json").write_text("{}")
    with pytest.raises(DataError, match="not a dataset description"):
        puzzles.read_info(folder)


def test_arrays_that_do_not_fit_the_description_are_refused(tmp_path: Path) -> None:
    split = split_4x4(5)
    with pytest.raises(DataError, match="inputs holds 5, expected values from 0 to 4"):
        puzzles.write_dataset(tmp_path / "a", info_4x4(vocab_size=5), {"train": split})
    with pytest.raises(DataError, match=r"inputs has shape \(5, 16\), expected \(5, 9\)"):
        puzzles.write_dataset(tmp_path / "b", info_4x4(seq_len=9), {"train": split})
    with pytest.raises(DataError, match="no rows"):
        puzzles.write_dataset(tmp_path / "c", info_4x4(), {"train": split_4x4(0)})


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", "a..b", ".hidden", "", "a\0", "a\n", "a b", "x" * 101])
def test_a_split_has_a_name_and_never_a_path(tmp_path: Path, name: str) -> None:
    folder = write_4x4(tmp_path / "data")
    described = json.loads((folder / "dataset.json").read_text())
    described["splits"] = {name: described["splits"]["train"]}
    (folder / "dataset.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match="not a dataset description"):
        puzzles.read_info(folder)
    with pytest.raises(DataError, match="expected names of letters, digits"):
        puzzles.write_dataset(tmp_path / "below" / "new", info_4x4(), {"train": split_4x4(5), name: split_4x4(5)})
    assert not (tmp_path / "below").exists()


@pytest.mark.parametrize("name", ["train", "v1.2", "all_of-it", "0"])
def test_names_of_splits_that_are_fine(tmp_path: Path, name: str) -> None:
    info = puzzles.write_dataset(tmp_path, info_4x4(), {name: split_4x4(5)})
    assert puzzles.read_info(tmp_path) == info
    assert len(puzzles.read_split(tmp_path, info, name)) == 5


def test_a_split_with_arrays_of_other_names_is_refused(tmp_path: Path) -> None:
    folder = write_4x4(tmp_path / "data")
    np.savez(folder / "train.npz", **{"../../evil": np.zeros(3)})
    described = json.loads((folder / "dataset.json").read_text())
    described["splits"]["train"]["sha256"] = hashlib.sha256((folder / "train.npz").read_bytes()).hexdigest()
    (folder / "dataset.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match=r"train\.npz"):
        puzzles.read_split(folder, puzzles.read_info(folder), "train")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["data", "dataset.json", "test.npz", "train.npz"]
