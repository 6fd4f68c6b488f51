"""Hugging Face folders of Qwen3, in and out, without torch: `config.json`, and safetensors in one file or several.

Their linear weights are [out, in], one tensor a layer; ours are [in, out] with heads as dimensions of their own,
stacked over the layers. A folder is read slice by slice: an array on several devices asks for the layers and columns of
its own shards only, so that no host holds more than those and one tensor.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tinypod.errors import ConfigError, UserError
from tinypod.models.qwen3 import LINEARS, Params, Qwen3Config
from tinypod.runs.checksums import flatten
from tinypod.runs.storage import inside, replace_file

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 4 * 2**30
_MODULES = {"attention": "self_attn", "mlp": "mlp"}
_NORMS = {
    "layers.attention.q_norm": "self_attn.q_norm",
    "layers.attention.k_norm": "self_attn.k_norm",
    "layers.attention_norm": "input_layernorm",
    "layers.mlp_norm": "post_attention_layernorm",
}
_PLAIN = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
# Our keys by theirs; the rest of a config.json does not change what dense Qwen3 computes, or must have these values.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_size",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
}
_FIXED = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def read_model_config(folder: Path, **more: Any) -> Qwen3Config:
    """The shape that a folder's `config.json` describes; `more` are keys of ours."""
    path = folder / CONFIG
    try:
        theirs = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder}: no {CONFIG}; expected the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    for key, expected in _FIXED.items():
        if theirs.get(key, expected) != expected:
            raise UserError(f"{path}: {key} is {theirs[key]!r}, expected {expected!r}: only dense Qwen3 can be read")
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"{path}: RoPE of type {rope.get('rope_type')!r} is not known here, only the default")
    if missing := [key for key in _KEYS if key not in theirs and key not in ("tie_word_embeddings", "rms_norm_eps")]:
        raise UserError(f"{path}: no {', '.join(missing)}; expected a config of Qwen3")
    ours = {name: theirs[key] for key, name in _KEYS.items() if key in theirs}
    theta = rope.get("rope_theta", theirs.get("rope_theta"))
    if theta is not None:
        ours["rope_theta"] = float(theta)
    return Qwen3Config.model_validate(ours | more)


def write_model_config(folder: Path, config: Qwen3Config, dtype: str) -> None:
    theirs: dict[str, Any] = {key: getattr(config, name) for key, name in _KEYS.items()} | _FIXED
    theirs |= {"architectures": ["Qwen3ForCausalLM"], "rope_theta": config.rope_theta, "torch_dtype": dtype}
    theirs["rope_parameters"] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    replace_file(folder / CONFIG, (json.dumps(theirs, indent=2) + "\n").encode())


class Tensors:
    """The tensors of a folder by name; each is read only where it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack, self._files = ExitStack(), dict[str, Any]()
        self._where = _find(folder)

    def __enter__(self) -> "Tensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def get(self, name: str) -> Any:
        """A slice of safetensors: indexing it reads just that."""
        from safetensors import SafetensorError, safe_open

        if name not in self._where:
            raise UserError(f"{self.folder}: no tensor {name}; these are the weights of another model")
        file = self._where[name]
        try:
            if file not in self._files:
                self._files[file] = self._stack.enter_context(safe_open(self.folder / file, framework="numpy"))
            return self._files[file].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.folder / file}: cannot be read: {error}") from None


def _find(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    if (folder / INDEX).exists():
        try:
            files: Mapping[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / INDEX}: not an index of safetensors ({error})") from None
        for name in set(files.values()):
            inside(folder, name)
        return dict(files)
    if not (folder / SINGLE).exists():
        raise UserError(f"{folder}: neither {SINGLE} nor {INDEX}; expected the folder of a Hugging Face model")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / SINGLE, framework="numpy") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / SINGLE}: cannot be read: {error}") from None


def read_params(folder: Path, config: Qwen3Config, shapes: Params, shardings: Params) -> Params:
    """Plain weights, in the shapes, dtypes and shardings asked for."""
    found = read_model_config(folder)
    different = [name for name in _KEYS.values() if getattr(found, name) != getattr(config, name)]
    if different:
        lines = "".join(
            f"\n  model.{name}: {getattr(config, name)} here, {getattr(found, name)} there" for name in different
        )
        raise ConfigError(f"{folder} is of another shape:{lines}")
    with Tensors(folder) as tensors:
        expected = {name for path, x in flatten(shapes).items() for name in names(path, x.shape[0])}
        if unknown := [name for name in tensors if name not in expected and name != _PLAIN["head"]]:
            raise UserError(f"{folder}: tensors that dense Qwen3 does not have: {', '.join(sorted(unknown)[:5])}")

        def read(path: Any, wanted: Any, sharding: Any) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return jax.make_array_from_callback(
                wanted.shape, sharding, lambda index: read_slice(tensors, name, wanted, index or ())
            )

        return jax.tree_util.tree_map_with_path(read, shapes, shardings)


def names(path: str, num_layers: int) -> list[str]:
    """Their names for a parameter of ours."""
    if path in _PLAIN:
        return [_PLAIN[path]]
    if path in _NORMS:
        return [f"model.layers.{i}.{_NORMS[path]}.weight" for i in range(num_layers)]
    _, group, name, *_ = path.split(".")
    return [f"model.layers.{i}.{_MODULES[group]}.{name}_proj.weight" for i in range(num_layers)]


def read_slice(tensors: Tensors, path: str, wanted: Any, index: tuple[slice, ...]) -> np.ndarray:
    """The part of one of our arrays that `index` says."""
    theirs = names(path, wanted.shape[0])
    if path in ("embed", "norm"):
        return np.asarray(tensors.get(theirs[0])[index]).astype(wanted.dtype)
    if path == "head":
        return np.asarray(tensors.get(theirs[0])[index[::-1]]).T.astype(wanted.dtype)
    parts = []
    for layer in range(*index[0].indices(wanted.shape[0])):
        tensor = tensors.get(theirs[layer])
        if path in _NORMS:
            parts.append(np.asarray(tensor[index[1]]))
            continue
        name = path.split(".")[2]
        num_inputs = len(LINEARS[name][1])
        shape, rest = wanted.shape[1:], index[1:]
        # Rows and columns of theirs that cover the part: of several dimensions, whole rows of the inner ones.
        into, kept_in = _span(shape[:num_inputs], rest[:num_inputs])
        out, kept_out = _span(shape[num_inputs:], rest[num_inputs:])
        block = np.asarray(tensor[out, into]).T
        parts.append(block.reshape(*kept_in, *kept_out)[_inner(rest[:num_inputs]) + _inner(rest[num_inputs:])])
    return np.stack(parts).astype(wanted.dtype)


def _span(shape: tuple[int, ...], index: tuple[slice, ...]) -> tuple[slice, tuple[int, ...]]:
    """Of dimensions that are one in their tensor: the stretch that holds the part, and its shape."""
    start, stop, _ = index[0].indices(shape[0])
    inner = math.prod(shape[1:])
    return slice(start * inner, stop * inner), (stop - start, *shape[1:])


def _inner(index: tuple[slice, ...]) -> tuple[slice, ...]:
    return (slice(None), *index[1:])


def write_params(folder: Path, config: Qwen3Config, params: Params, dtype: str = "bfloat16") -> None:
    """Float weights as a Hugging Face folder."""
    write_tensors(folder, tensors_of(params, np.dtype(dtype)))
    write_model_config(folder, config, dtype)


def write_tensors(folder: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> list[str]:
    """Files of at most 4 GiB, with an index if they are several; returns their names."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, np.ndarray]] = [{}]
    size, total = 0, 0
    for name, tensor in tensors:
        if size + tensor.nbytes > SHARD_BYTES and files[-1]:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    count = len(files)
    where: dict[str, str] = {}
    for number, some in enumerate(files, start=1):
        file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(some, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(some, file)
    written = list(dict.fromkeys(where.values()))
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        replace_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        written.append(INDEX)
    return written


def tensors_of(params: Params, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Our plain weights under their names and in their orientation."""
    for path, leaf in flatten(params).items():
        theirs = names(path, leaf.shape[0])
        for number, name in enumerate(theirs):
            value = np.asarray(leaf if path in _PLAIN else leaf[number])
            if path == "head":
                value = value.T
            elif path not in _PLAIN and path not in _NORMS:
                num_inputs = len(LINEARS[path.split(".")[2]][1])
                value = value.reshape(math.prod(value.shape[:num_inputs]), -1).T
            yield name, np.ascontiguousarray(value.astype(dtype))
