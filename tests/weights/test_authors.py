from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from tinypod.errors import UserError
from tinypod.models import trm
from tinypod.weights import authors as torch_weights

GOLDEN = Path(__file__).parents[1] / "golden"


def authors_file(tmp_path: Path, name: str, prefix: str = "") -> Path:
    arrays = np.load(GOLDEN / f"{name}.npz")
    keys = [key for key in arrays.files if key.startswith("init/")]
    path = tmp_path / "theirs.pt"
    torch.save({prefix + key.removeprefix("init/"): torch.tensor(arrays[key]) for key in keys}, path)
    return path


def like(name: str, **changes) -> trm.Params:
    attention = name == "trm_attention"
    fields = {
        "hidden_size": 32,
        "num_layers": 2,
        "H_cycles": 2,
        "L_cycles": 3,
        "mixing": trm.AttentionMixing(num_heads=2) if attention else trm.MlpMixing(),
        "puzzle_embedding": trm.PuzzleTable(width=32, length=4),
    }
    config = trm.TrmConfig(**(fields | changes))
    return jax.eval_shape(lambda: trm.init(config, trm.PuzzleShape(16, 6, 5), jax.random.key(0)))


@pytest.mark.parametrize("prefix", ["", "_orig_mod.model.", "model."])
@pytest.mark.parametrize("name", ["trm_mlp", "trm_attention"])
def test_a_file_survives_the_way_in_and_out(tmp_path: Path, name: str, prefix: str) -> None:
    path = authors_file(tmp_path, name, prefix)
    params = torch_weights.from_state_dict(torch_weights.read_state_dict(path), like(name))
    back = tmp_path / "back.pt"
    torch_weights.write_state_dict(back, torch_weights.to_state_dict(params))
    theirs, ours = torch.load(path, weights_only=True), torch.load(back, weights_only=True)
    assert {prefix + key for key in ours} == set(theirs)
    for key, value in ours.items():
        assert torch.equal(value, theirs[prefix + key]), key


@pytest.mark.parametrize("name", ["trm_mlp", "trm_attention"])
def test_a_single_z_and_separate_nets_have_the_authors_names(name: str) -> None:
    """Their single z starts from L_init; their separate nets, HRM's, are H_level and L_level."""
    single = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like(name, single_z=True))
    names = torch_weights.to_state_dict(single)
    assert "inner.L_init" in names
    assert "inner.H_init" not in names
    shapes = like(name, separate_nets=True)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), shapes)
    theirs = torch_weights.to_state_dict(params)
    assert (
        theirs["inner.H_level.layers.1.mlp.down_proj.weight"].tolist()
        == params["layers_H"]["mlp"]["down"][1].T.tolist()
    )
    assert (
        theirs["inner.L_level.layers.0.mlp.down_proj.weight"].tolist()
        == params["layers_L"]["mlp"]["down"][0].T.tolist()
    )
    back = torch_weights.from_state_dict(theirs, shapes)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True))


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    state_dict = torch_weights.read_state_dict(authors_file(tmp_path, "trm_mlp"))
    with pytest.raises(UserError) as caught:
        torch_weights.from_state_dict(state_dict, like("trm_attention"))
    assert "missing from the file: L_level.layers.0.self_attn.qkv_proj.weight" in str(caught.value)
    assert "in the file, but not in this config: L_level.layers.1.mlp_t.down_proj.weight" in str(caught.value)
    wider = like("trm_mlp", mlp_multiple_of=128)
    with pytest.raises(
        UserError, match=r"layers\.mlp\.gate_up: the file has \(2, 32, 512\), this config \(2, 32, 256\)"
    ):
        torch_weights.from_state_dict(state_dict, wider)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file at"):
        torch_weights.read_state_dict(tmp_path / "none.pt")
    cut = authors_file(tmp_path, "trm_mlp")
    cut.write_bytes(cut.read_bytes()[:1000])
    with pytest.raises(UserError, match="not a PyTorch file"):
        torch_weights.read_state_dict(cut)
    whole = tmp_path / "whole.pt"
    torch.save({"model": {"a": torch.zeros(1)}}, whole)
    with pytest.raises(UserError, match="expected a state dict"):
        torch_weights.read_state_dict(whole)


class Payload:
    """A pickle that would write a file when loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_file_cannot_run_code(tmp_path: Path) -> None:
    trap, path = tmp_path / "trap", tmp_path / "evil.pt"
    torch.save({"weight": Payload(trap)}, path)
    with pytest.raises(UserError, match="not a PyTorch file of plain weights"):
        torch_weights.read_state_dict(path)
    assert not trap.exists()
