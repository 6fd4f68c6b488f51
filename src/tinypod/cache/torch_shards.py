"""`tinypod cache import`: caches of teachers' top-K logits that other programs wrote with `torch.save`.

Such a folder has `shard_00000.pt` and so on, each a dict of `input_ids` [n, L], `topk_idx` and `topk_logits`
[n, L-1, K], raw logits by falling value, and perhaps `attention_mask` [n, L], and a `meta.json`. Position p is about
token p + 1, as in ours. They have no normaliser of the logits, so that ours has none either (no `temperatures`): only
the renormalised loss can be computed from it.

A shard becomes one of ours; the last blocks of all are held out. As in a build, what is there is not written again, and
`manifest.json` comes last.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from tinypod.cache.build import begin, split_spans
from tinypod.data import blocks, torch_file
from tinypod.data.tokens import BYTES, Tokenizer
from tinypod.errors import DataError, UserError
from tinypod.runs.terminal import counting, say, size, warn

# Ours, and what some programs call it.
_NAMES = {
    "input_ids": ("input_ids", "ids"),
    "attention_mask": ("attention_mask",),
    "topk_idx": ("topk_idx", "topk_indices"),
    "topk_logits": ("topk_logits",),
}
_LEFT_OUT = ("rand_idx", "rand_logits")  # logits of random tokens: the losses here have no use for them


class Source(NamedTuple):
    """A shard of theirs, its tensors not read yet."""

    path: Path
    tensors: dict[str, torch_file.Tensor]
    more: tuple[str, ...]  # what else it holds

    @property
    def blocks(self) -> int:
        return self.tensors["input_ids"].shape[0]


def import_cache(
    source: Path,
    folder: Path,
    console: Console,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    held_out: float = 0.02,
) -> blocks.Manifest:
    """A cache of ours from a folder of theirs; what is not given is taken from its `meta.json`."""
    if (folder / blocks.MANIFEST).exists():
        raise UserError(f"{folder} already holds a cache; remove it first or choose another folder")
    meta = _read_json(source / "meta.json")
    shards = [open_shard(path) for path in _find(source)]
    length, topk = _common_shape(shards)
    if left_out := sorted({name for shard in shards for name in shard.more}):
        say(console, f"{source}: {', '.join(left_out)} are left out: the losses here do not use them")
    if _read_json(source / "progress.json").get("done") is False:
        warn(console, f"{source}: its progress.json says that it is not complete; what is there is imported")
    masked = any("attention_mask" in shard.tensors and not _mask(shard).all() for shard in shards)
    count = sum(shard.blocks for shard in shards)
    spans = split_spans(count, held_out)
    manifest = blocks.Manifest(
        length=length,
        vocab_size=_vocab_size(meta, tokenizer, vocab_size),
        tokenizer=_tokenizer(meta, tokenizer),
        origin=f"{source.absolute()}: {_origin(meta)}, {count * length:,} tokens",
        masked=masked,
        teacher=blocks.Teacher(name=str(meta.get("teacher_model", "unknown")), topk=topk, temperatures=[]),
    )
    identity = [[str(shard.path.name), torch_file.checksum(shard.path)] for shard in shards]
    content = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    begin(folder, {"blocks": content, "manifest": manifest.model_dump(mode="json"), "held_out": held_out})
    sizes = ", ".join(f"{stop - start:,} {name}" for name, (start, stop) in spans.items())
    say(console, f"{folder}: {count:,} blocks of {length} tokens ({sizes}), {size(count * manifest.block_bytes())}")
    splits: dict[str, list[blocks.Shard]] = {name: [] for name in spans}
    seen: dict[str, set[bytes]] = {name: set() for name in spans}
    first = 0
    with counting(console, "blocks", count) as progress:
        for shard in shards:
            parts = {
                name: slice(max(start - first, 0), min(stop - first, shard.blocks))
                for name, (start, stop) in spans.items()
                if start < first + shard.blocks and stop > first
            }
            _convert(folder, shard, parts, manifest, splits, seen)
            first += shard.blocks
            progress(shard.blocks)
    if again := len(seen["train"] & seen.get("held_out", set())):
        warn(console, f"{again:,} of the held-out blocks are among those to train on, too: the source repeats blocks")
    manifest = manifest.model_copy(update={"splits": splits})
    blocks.write_manifest(folder, manifest)
    say(console, "it has no normalisers of the teacher's logits: train with task.kd=renormalised")
    return manifest


def open_shard(path: Path) -> Source:
    """With every shape checked; nothing but the description of its tensors is read."""
    found = torch_file.read(path)
    if not isinstance(found, dict):
        raise DataError(f"{path}: holds a {type(found).__name__}, expected a dict of tensors")
    tensors: dict[str, torch_file.Tensor] = {}
    for name, aliases in _NAMES.items():
        present = [alias for alias in aliases if isinstance(found.get(alias), torch_file.Tensor)]
        if present:
            tensors[name] = found[present[0]]
        elif name != "attention_mask":
            raise DataError(f"{path}: no {name}; it has {', '.join(map(str, found)) or 'nothing'}")
    ids, top = tensors["input_ids"].shape, tensors["topk_idx"].shape
    if len(ids) != 2 or ids[0] < 1 or ids[1] < 2:
        raise DataError(f"{path}: input_ids is {list(ids)}, expected [blocks, tokens]")
    expected = (ids[0], ids[1] - 1, top[-1] if top else 0)
    for name, shape in {"topk_idx": expected, "topk_logits": expected, "attention_mask": ids}.items():
        if name in tensors and (tensors[name].shape != shape or 0 in shape):
            raise DataError(f"{path}: {name} is {list(tensors[name].shape)}, expected {list(shape)} as the others are")
    return Source(path, tensors, tuple(name for name in _LEFT_OUT if name in found))


def read_arrays(shard: Source, manifest: blocks.Manifest) -> dict[str, np.ndarray]:
    """What a shard of ours holds of it."""
    ids, top = (_integers(shard, name, manifest.vocab_size) for name in ("input_ids", "topk_idx"))
    logits = shard.tensors["topk_logits"].read()
    if not np.issubdtype(logits.dtype, np.floating) or not np.isfinite(logits).all():
        raise DataError(f"{shard.path}: topk_logits are not all finite floats")
    limit = np.finfo(np.float16).max
    logits = np.clip(logits, -limit, limit).astype(np.float16)
    if (logits[..., 1:] > logits[..., :-1]).any():  # the first is taken for the teacher's choice
        order = np.argsort(-logits, axis=-1, kind="stable")
        top, logits = (np.take_along_axis(x, order, axis=-1) for x in (top, logits))
    arrays = {"input_ids": ids, "topk_idx": top, "topk_logits": logits}
    return arrays | {"mask": _mask(shard)} if manifest.masked else arrays


def _convert(
    folder: Path,
    shard: Source,
    parts: dict[str, slice],
    manifest: blocks.Manifest,
    splits: dict[str, list[blocks.Shard]],
    seen: dict[str, set[bytes]],
) -> None:
    files = {name: f"{name}_{len(splits[name]):05d}.safetensors" for name in parts}
    there = all(
        (folder / file).exists() for file in files.values()
    )  # whole: they have their names only since they were
    ids = shard.tensors["input_ids"].read()
    arrays = {} if there else read_arrays(shard, manifest)
    for name, part in parts.items():
        seen[name] |= {hashlib.sha256(row.tobytes()).digest() for row in ids[part]}
        if there:
            made = blocks.describe_shard(folder / files[name], files[name], part.stop - part.start)
        else:
            made = blocks.write_shard(folder, files[name], {key: x[part] for key, x in arrays.items()})
        splits[name].append(made)


def _find(source: Path) -> list[Path]:
    found = sorted(path for path in source.glob("shard_*.pt") if re.fullmatch(r"shard_\d+\.pt", path.name))
    if not found:
        raise DataError(f"{source}: no shard_00000.pt; expected a folder of shards that torch.save wrote")
    for number, path in enumerate(found):
        if int(path.stem.removeprefix("shard_")) != number:
            raise DataError(f"{source}: shard {number} is missing; the next one is {path.name}")
    return found


def _common_shape(shards: Sequence[Source]) -> tuple[int, int]:
    """Tokens of a block, and logits of a position."""
    shapes = [(shard.tensors["input_ids"].shape[1], shard.tensors["topk_idx"].shape[2]) for shard in shards]
    for shard, (length, topk) in zip(shards, shapes, strict=True):
        if (length, topk) != shapes[0]:
            raise DataError(
                f"{shard.path}: blocks of {length} tokens with {topk} logits per position; "
                f"{shards[0].path.name} has {shapes[0][0]} and {shapes[0][1]}"
            )
    return shapes[0]


def _mask(shard: Source) -> np.ndarray:
    if "attention_mask" not in shard.tensors:
        return np.ones(shard.tensors["input_ids"].shape, np.uint8)
    return (shard.tensors["attention_mask"].read() != 0).astype(np.uint8)


def _integers(shard: Source, name: str, vocab_size: int) -> np.ndarray:
    found = shard.tensors[name].read()
    if not np.issubdtype(found.dtype, np.integer):
        raise DataError(f"{shard.path}: {name} are {found.dtype}, expected integers")
    if found.min() < 0 or found.max() >= vocab_size:
        raise DataError(
            f"{shard.path}: {name} go from {found.min()} to {found.max()}; the vocabulary has {vocab_size} tokens"
        )
    return found.astype(np.int32)


def _read_json(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected a JSON object")
    return found


def _tokenizer(meta: dict[str, Any], given: str | None) -> str:
    if given is None:
        return str(meta.get("tokenizer", "unknown"))
    return given if given == BYTES else str(Path(given).absolute())


def _vocab_size(meta: dict[str, Any], tokenizer: str | None, given: int | None) -> int:
    if given is not None or isinstance(meta.get("vocab_size"), int):
        return given or meta["vocab_size"]
    if tokenizer is not None:
        return Tokenizer(tokenizer).vocab_size
    raise DataError("how many tokens there are is not known: no vocab_size in a meta.json; give it with --vocab-size")


def _origin(meta: dict[str, Any]) -> str:
    names = [str(meta[key]) for key in ("dataset_name", "dataset_config_name", "dataset_split") if meta.get(key)]
    return " ".join(names) or "no meta.json"
