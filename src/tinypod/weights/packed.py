"""Low-bit weights as they are: a folder with the packed indices and the factors of their scales, `packed.json` last.

The tensors have the names of a Hugging Face folder, one a layer, with `weight` replaced by what a low-bit weight is
made of, for `out` outputs and `in` inputs (heads and their width are one dimension, the head outermost):

    index  uint8 [out, ⌈in·w/8⌉]   w bits an index, along the inputs, the first one lowest in its byte; w is 2, 4 or 8,
                                   the first that holds `bits`; a row that ends inside of a byte is filled with zeros
    A, B   [out, r], [r, in]       float32 as in the run, or float16, the columns of A and rows of B normalised first
    g      [r]                     float16 where that holds every one of them (they were snapped), else float32

    W[o, i] = (2 index[o, i] / (2^bits - 1) - 1) · Σ_k A[o, k] / ‖A[:, k]‖ · g[k] · B[k, i] / ‖B[k, :]‖

Embedding and head are bfloat16 where that changes nothing, else as A and B; norms are float32. `packed.json` has the
shape, the bits and ranks, and a hash of each file: what is damaged is not read.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from pydantic import ValidationError

from tinypod.errors import UserError
from tinypod.models import qwen3
from tinypod.models.low_bit import EPSILON
from tinypod.models.qwen3 import LINEARS, Params, Qwen3Config
from tinypod.runs.checksums import flatten
from tinypod.runs.storage import inside, replace_file
from tinypod.runs.terminal import size
from tinypod.weights import hugging_face
from tinypod.weights.convert import SHAPE

ABOUT, FORMAT, VERSION = "packed.json", "tinypod packed", 1
Dtype = Literal["float32", "float16"]
_STORED = (*SHAPE, "rope_theta", "norm_eps")
_PARTS = {"index", "A", "B", "g"}


def width_of(bits: int) -> int:
    """Bits that an index takes in the file."""
    return 2 if bits <= 2 else 4 if bits <= 4 else 8


def pack(index: np.ndarray, bits: int) -> np.ndarray:
    """[rows, n] -> [rows, bytes]."""
    width = width_of(bits)
    count = 8 // width
    padded = np.pad(index, ((0, 0), (0, -index.shape[1] % count))).reshape(len(index), -1, count)
    return np.bitwise_or.reduce(padded << np.arange(0, 8, width, dtype=np.uint8), axis=-1)


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """[rows, bytes] -> [rows, count]."""
    width = width_of(bits)
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    spread = (packed[:, :, None] >> shifts) & np.uint8(2**width - 1)
    return spread.reshape(len(packed), -1)[:, :count]


def write(folder: Path, config: Qwen3Config, params: Params, dtype: Dtype = "float16") -> str:
    """Returns how large it is, for a person."""
    if config.quantisation is None:
        raise UserError(
            "--format packed is for low-bit weights; quantise them first: `tinypod weights import RUN RUN NEW_RUN "
            "model.low_bit=q4_r32`"
        )
    if config.lora is not None:
        raise UserError(
            "--format packed holds no adapters; merge them first: `tinypod weights import RUN RUN NEW_RUN "
            "model.lora=null`, and export that run"
        )
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose another folder")
    in_linears = 0

    def counted() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal in_linears
        yield from _plain(params, dtype)
        for name in LINEARS:
            for key, tensor in _linear(config, name, params["layers"][LINEARS[name][0]][name], dtype):
                in_linears += tensor.nbytes
                yield key, tensor

    files = hugging_face.write_tensors(folder, counted())
    total = sum((folder / file).stat().st_size for file in files)
    shapes = flatten(params)
    weights = sum(x.size for path, x in shapes.items() if path.endswith(".index"))
    others = sum(x.size for path, x in shapes.items() if path.rpartition(".")[2] not in _PARTS)
    low = config.quantisation
    about = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype,
        "size_bytes": total,
        "bits_per_weight": round(8 * in_linears / weights, 4),  # of the linear layers
        "model": {name: getattr(config, name) for name in _STORED} | {"low_bit": low.model_dump(mode="json")},
        "files": {file: _hash(folder / file) for file in files},
    }
    replace_file(folder / ABOUT, (json.dumps(about, indent=2) + "\n").encode(), durable=True)
    return (
        f"{size(total)}: {8 * in_linears / weights:.2f} bits per weight in the linear layers ({weights:,} weights), "
        f"{8 * total / (weights + others):.2f} in all"
    )


def _plain(params: Params, dtype: Dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Embedding, head and norms."""
    for name in ("embed", "head"):
        if name in params:
            yield from hugging_face.tensors_of({name: params[name]}, _narrowest(params[name], dtype))
    layers = params["layers"]
    groups = {group: {k: x for k, x in layers[group].items() if k not in LINEARS} for group in ("attention", "mlp")}
    yield from hugging_face.tensors_of({"norm": params["norm"], "layers": layers | groups}, np.dtype(np.float32))


def _narrowest(value: Any, dtype: Dtype) -> np.dtype:
    exact = np.asarray(value, np.float32)
    short = np.dtype("bfloat16")
    return short if np.array_equal(exact.astype(short).astype(np.float32), exact) else np.dtype(dtype)


def _linear(config: Qwen3Config, name: str, leaf: dict[str, Any], dtype: Dtype) -> Iterator[tuple[str, np.ndarray]]:
    if unknown := sorted(set(leaf) - _PARTS):
        raise UserError(f"--format packed: {name} has {', '.join(unknown)}, which this format does not hold")
    into, out = (math.prod(config.sizes(letters)) for letters in LINEARS[name][1:])
    for layer in range(config.num_layers):
        prefix = _prefix(config, name, layer)
        one = {part: np.asarray(x[layer]) for part, x in leaf.items()}
        yield f"{prefix}index", pack(np.ascontiguousarray(one["index"].reshape(into, out).T), config.bits(name))
        a, b, g = one["A"].reshape(out, -1), one["B"].reshape(-1, into), one["g"]
        if dtype == "float16":
            a = (a / np.maximum(np.linalg.norm(a, axis=0, keepdims=True), EPSILON)).astype(np.float16)
            b = (b / np.maximum(np.linalg.norm(b, axis=1, keepdims=True), EPSILON)).astype(np.float16)
        with np.errstate(over="ignore"):
            short = g.astype(np.float16)
        yield f"{prefix}A", np.ascontiguousarray(a)
        yield f"{prefix}B", np.ascontiguousarray(b)
        yield f"{prefix}g", short if np.array_equal(short.astype(np.float32), g) else g


def _prefix(config: Qwen3Config, name: str, layer: int) -> str:
    path = f"layers.{LINEARS[name][0]}.{name}.weight"
    return hugging_face.names(path, config.num_layers)[layer].removesuffix("weight")


def read(folder: Path, **more: Any) -> tuple[Qwen3Config, Params]:
    """The shape that a folder describes and its weights, in numpy; `more` are keys of ours."""
    config = _read_about(folder, more)
    shapes = jax.eval_shape(lambda: qwen3.init(config, jax.random.key(0)))
    with hugging_face.Tensors(folder) as tensors:

        def take(key_path: Any, wanted: Any) -> np.ndarray:
            path = jax.tree_util.keystr(key_path, simple=True, separator=".")
            part = path.rpartition(".")[2]
            if part not in _PARTS:
                found = hugging_face.read_slice(tensors, path, wanted, (slice(None),) * wanted.ndim)
                if found.shape != wanted.shape:
                    raise UserError(f"{folder}: {path} is {found.shape}, expected {wanted.shape}: not as {ABOUT} says")
                return found
            name = path.split(".")[2]
            values = [_read_part(tensors, config, name, layer, part) for layer in range(config.num_layers)]
            return np.stack([x.reshape(wanted.shape[1:]) for x in values])

        params: Params = jax.tree_util.tree_map_with_path(take, shapes)
    return config, params


def _read_part(tensors: hugging_face.Tensors, config: Qwen3Config, name: str, layer: int, part: str) -> np.ndarray:
    """Of one layer, in our order of dimensions."""
    key = f"{_prefix(config, name, layer)}{part}"
    into, out = (math.prod(config.sizes(letters)) for letters in LINEARS[name][1:])
    rank, width = config.rank(name), width_of(config.bits(name))
    shapes = {"index": (out, -(-into * width // 8)), "A": (out, rank), "B": (rank, into), "g": (rank,)}
    found = np.asarray(tensors.get(key)[:])
    if found.shape != shapes[part] or (part == "index") != (found.dtype == np.uint8):
        raise UserError(
            f"{tensors.folder}: {key} is {found.dtype} {list(found.shape)}, expected {list(shapes[part])}: not as "
            f"{ABOUT} says"
        )
    return unpack(found, config.bits(name), into).T if part == "index" else found.astype(np.float32)


def _read_about(folder: Path, more: dict[str, Any]) -> Qwen3Config:
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text())
        found = about["format"], about["version"]
        files, model = dict(about["files"]), dict(about["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}: {error}); export it again") from None
    if found != (FORMAT, VERSION):
        raise UserError(
            f"{path}: {found[0]!r} of version {found[1]}; this tinypod reads {FORMAT!r} of version {VERSION}"
        )
    for file, expected in files.items():
        if not inside(folder, file).exists() or _hash(folder / file) != expected:
            raise UserError(f"{folder / file}: not as it was written (cut off or damaged); export or copy it again")
    with hugging_face.Tensors(folder) as tensors:
        exact = tensors.get("model.embed_tokens.weight").get_dtype() == "BF16"
    try:
        return Qwen3Config.model_validate(model | {"weight_dtype": "bfloat16" if exact else "float32"} | more)
    except ValidationError as error:
        raise UserError(f"{path}: not the shape of a model: {error}") from None


def _hash(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
