import json
from pathlib import Path

import numpy as np
import pytest

from tinypod.data import authors, puzzles
from tinypod.errors import DataError


def authors_folder(folder: Path) -> Path:
    """Two groups, as their scripts write them: three puzzles with an example each, and one puzzle with two."""
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        described = {
            "pad_id": 0,
            "ignore_label_id": 0,
            "blank_identifier_id": 0,
            "vocab_size": 11,
            "seq_len": 4,
            "num_puzzle_identifiers": 3,
            "total_groups": 2,
            "mean_puzzle_examples": 1.25,
            "total_puzzles": 4,
            "sets": ["all"],
        }
        (folder / split / "dataset.json").write_text(json.dumps(described))
        arrays = {
            "inputs": np.arange(20).reshape(5, 4) % 11,
            "labels": np.arange(20).reshape(5, 4) % 10 + 1,
            "puzzle_identifiers": np.array([1, 1, 2, 2], np.int32),
            "puzzle_indices": np.array([0, 1, 2, 3, 5], np.int32),
            "group_indices": np.array([0, 3, 4], np.int32),
        }
        for name, array in arrays.items():
            np.save(folder / split / f"all__{name}.npy", array)
    return folder


def test_the_authors_folders_are_read(tmp_path: Path) -> None:
    info, splits = authors.import_folder(authors_folder(tmp_path / "theirs"))
    train = splits["train"]
    assert (info.seq_len, info.vocab_size, info.num_identifiers, info.grouped) == (4, 11, 3, True)
    assert train.identifiers.tolist() == [1, 1, 2, 2, 2]
    assert train.group_offsets.tolist() == [0, 3, 5]
    assert train.group_weights.tolist() == [
        1.0,
        2.0,
    ]  # an epoch shows one example of the first group, two of the second
    written = puzzles.write_dataset(tmp_path / "ours", info, splits)
    again = puzzles.read_split(tmp_path / "ours", written, "train")
    assert np.array_equal(again.inputs, train.inputs)
    assert np.array_equal(again.group_offsets, train.group_offsets)


def test_labels_ignored_by_the_authors_are_ignored_here(tmp_path: Path) -> None:
    folder = authors_folder(tmp_path / "theirs")
    described = json.loads((folder / "train/dataset.json").read_text()) | {"ignore_label_id": 3}
    (folder / "train/dataset.json").write_text(json.dumps(described))
    _, splits = authors.import_folder(folder)
    assert splits["train"].labels.reshape(-1)[2] == 0
    assert splits["test"].labels.reshape(-1)[2] == 3


def test_what_is_wrong_with_an_authors_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no converted dataset here"):
        authors.import_folder(tmp_path)
    folder = authors_folder(tmp_path / "theirs")
    (folder / "test/all__labels.npy").unlink()
    with pytest.raises(DataError, match=r"test/all__labels\.npy: missing"):
        authors.import_folder(folder)
    folder = authors_folder(tmp_path / "cut")
    path = folder / "train/all__inputs.npy"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataError, match=r"train/all__inputs\.npy: not readable"):
        authors.import_folder(folder)
    folder = authors_folder(tmp_path / "odd")
    np.save(folder / "train/all__puzzle_indices.npy", np.array([0, 1, 2, 3, 4]))
    with pytest.raises(DataError, match=r"all__puzzle_indices\.npy: expected offsets that grow from 0 to 5"):
        authors.import_folder(folder)


@pytest.mark.parametrize(
    ("field", "array", "message"),
    [
        ("group_indices", np.array([0, 0, 4]), "offsets that grow from 0 to 4"),
        ("puzzle_indices", np.array([0, 2, 1, 3, 5]), "offsets that grow"),
        ("puzzle_indices", np.array(5), "expected integers in 1 dimensions"),
        ("inputs", np.full((5, 4), 1.7), "float64.*expected integers in 2 dimensions"),
        ("inputs", np.full((5, 4), 300), "tokens from 300 to 300, not 0 to 255"),
        ("labels", np.ones((4, 4), int), "do not belong together"),
        ("puzzle_identifiers", np.array([1, 1, 2]), "offsets that grow from 0 to 3"),
    ],
)
def test_arrays_that_cannot_be_are_refused(tmp_path: Path, field: str, array: np.ndarray, message: str) -> None:
    folder = authors_folder(tmp_path / "theirs")
    np.save(folder / "train" / f"all__{field}.npy", array)
    with pytest.raises(DataError, match=message):
        authors.import_folder(folder)


@pytest.mark.parametrize(("key", "value"), [("seq_len", "x"), ("sets", []), ("sets", 3), ("vocab_size", None)])
def test_a_description_that_cannot_be_is_refused(tmp_path: Path, key: str, value: object) -> None:
    folder = authors_folder(tmp_path / "theirs")
    path = folder / "train/dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(DataError, match=f"not in the authors' format: {key}"):
        authors.import_folder(folder)


@pytest.mark.parametrize("name", ["../../secret", "/etc/x", "a/b", "..", ""])
def test_a_set_has_a_name_and_never_a_path(tmp_path: Path, name: str) -> None:
    folder = authors_folder(tmp_path / "theirs")
    path = folder / "train/dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sets": [name]}))
    with pytest.raises(DataError, match="not in the authors' format: sets"):
        authors.import_folder(folder)
