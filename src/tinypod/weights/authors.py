"""The TRM authors' PyTorch state dicts, in and out.

Their linear weights are [out, in] and stand layer by layer; ours are [in, out], stacked over the layers, with heads and
the halves of a SwiGLU as dimensions of their own, in the same order. Their names may carry the prefixes that their
training script leaves (`_orig_mod.`, `model.`) or lack `inner.`; we write `inner.` alone.
"""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tinypod.errors import ConfigError, UserError
from tinypod.models.trm import Params, TrmConfig
from tinypod.runs.checksums import flatten
from tinypod.sharding import path_of

StateDict = dict[str, np.ndarray]

# our path -> (their name, whether to transpose)
_PLAIN = {
    "embed.tokens": ("embed_tokens.embedding_weight", False),
    "embed.positions": ("embed_pos.embedding_weight", False),
    "head": ("lm_head.weight", True),
    "q_head.weight": ("q_head.weight", True),
    "q_head.bias": ("q_head.bias", False),
    "z_init.H": ("H_init", False),
    "z_init.L": ("L_init", False),
    "puzzle_table": ("puzzle_emb.weights", False),
}
# Of a net: our group and what is in it -> theirs. Their code with separate nets is HRM's.
_LEVELS = {"layers": "L_level", "layers_L": "L_level", "layers_H": "H_level"}
_IN_LAYER = {
    "token_mlp.gate_up": "mlp_t.gate_up_proj.weight",
    "token_mlp.down": "mlp_t.down_proj.weight",
    "attention.qkv": "self_attn.qkv_proj.weight",
    "attention.out": "self_attn.o_proj.weight",
    "mlp.gate_up": "mlp.gate_up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
}
PREFIXES = ("_orig_mod.", "model.", "inner.")


def check_model(config: TrmConfig) -> None:
    """Their code has one gate: with another, the same weights would compute something else there."""
    if config.gate != "swiglu":
        raise ConfigError(
            f"model.gate={config.gate}: the TRM authors' files hold models of model.gate=swiglu alone; with this gate, "
            "keep the weights in a run's folder, which `tinypod train`, `eval` and `solve` take"
        )


def from_state_dict(state_dict: StateDict, like: Params) -> Params:
    """Their weights in the structure of `like` (our parameters, real or abstract); every name and shape must match."""
    theirs = {_bare(name): np.asarray(value, np.float32) for name, value in state_dict.items()}
    wrong: list[str] = []

    def take(key_path: tuple[Any, ...], wanted: Any) -> np.ndarray | None:
        path = path_of(key_path)
        names = _their_names(path, wanted.shape[0])
        if missing := [name for name in names if name not in theirs]:
            wrong.extend(f"missing from the file: {name}" for name in missing)
            return None
        found = [theirs.pop(name) for name in names]
        value = np.stack([x.T for x in found]) if _is_layered(path) else found[0].T if _PLAIN[path][1] else found[0]
        if value.shape != (flat := _flat_shape(path, wanted.shape)):
            wrong.append(f"{path}: the file has {value.shape}, this config {flat}")
            return None
        return np.ascontiguousarray(value).reshape(wanted.shape)

    params: Params = jax.tree_util.tree_map_with_path(take, like)
    wrong += [f"in the file, but not in this config: {name}" for name in sorted(theirs)]
    if wrong:
        raise UserError("these are the weights of another model:\n" + "\n".join(f"  {line}" for line in wrong))
    return params


def to_state_dict(params: Params) -> StateDict:
    """Our parameters under the authors' names and in their orientation."""
    state_dict: StateDict = {}
    for path, leaf in flatten(params).items():
        value = np.asarray(leaf).reshape(_flat_shape(path, leaf.shape))
        names = _their_names(path, value.shape[0])
        pieces = [layer.T for layer in value] if _is_layered(path) else [value.T if _PLAIN[path][1] else value]
        state_dict |= {f"inner.{name}": np.ascontiguousarray(piece) for name, piece in zip(names, pieces, strict=True)}
    return state_dict


def read_state_dict(path: Path) -> StateDict:
    """Load a `.pt` file; weights only, so that a file from the net cannot run code."""
    torch = _import_torch()
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no file at {path}") from None
    except Exception as error:  # torch raises pickle, zip, runtime and OS errors for a bad file
        raise UserError(
            f"{path}: not a PyTorch file of plain weights ({type(error).__name__}); "
            "expected what torch.save(model.state_dict(), ...) writes"
        ) from None
    if not (isinstance(loaded, dict) and loaded and all(isinstance(value, torch.Tensor) for value in loaded.values())):
        raise UserError(f"{path}: expected a state dict (names to tensors), found a {type(loaded).__name__}")
    return {name: value.to(torch.float32).numpy() for name, value in loaded.items()}


def write_state_dict(path: Path, state_dict: StateDict) -> None:
    torch = _import_torch()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.save({name: torch.tensor(value) for name, value in state_dict.items()}, path)
    except RuntimeError as error:  # its word for a folder in the way or a full disk
        raise UserError(f"{path}: cannot be written: {str(error).splitlines()[0]}") from None


def _import_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise UserError("PyTorch weights need PyTorch: pip install 'tinypod[torch]'") from None
    return torch


def _bare(name: str) -> str:
    while name.startswith(PREFIXES):
        name = name.split(".", 1)[1]
    return name


def _their_names(path: str, num_layers: int) -> list[str]:
    if _is_layered(path):
        group, _, rest = path.partition(".")
        return [f"{_LEVELS[group]}.layers.{i}.{_IN_LAYER[rest]}" for i in range(num_layers)]
    return [_PLAIN[path][0]]


def _is_layered(path: str) -> bool:
    return path.split(".")[0] in _LEVELS


def _flat_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """[layers, in, out], where ours splits `out` (of gate_up, qkv) or `in` (of the attention's out) into more."""
    if not _is_layered(path):
        return shape
    if path.endswith(".out"):
        return (shape[0], math.prod(shape[1:-1]), shape[-1])
    return (shape[0], shape[1], math.prod(shape[2:]))
