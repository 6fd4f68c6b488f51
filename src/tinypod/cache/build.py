"""`tinypod cache build`: text to blocks, and what a teacher makes of each of them.

The text is cut into blocks first, and a shard is a stretch of them: which block is where depends on the text and the
settings alone. `build.json` has those settings. A build that was cut off computes the shards that are not there yet,
none twice; `manifest.json` comes last, and without it there is no cache.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console

from tinypod import sharding
from tinypod.data import blocks, hub_text, tokens
from tinypod.errors import UserError
from tinypod.models import qwen3
from tinypod.runs.storage import replace_file
from tinypod.runs.terminal import counting, say, size
from tinypod.tasks import distill_losses
from tinypod.weights import language_model
from tinypod.weights.language_model import LanguageModel

SETTINGS = "build.json"


class Settings(NamedTuple):
    length: int = 1024
    topk: int = 128
    temperatures: tuple[float, ...] = (1.0, 2.0)
    held_out: float = 0.02  # share of the blocks, at the end of the text
    blocks: int | None = None  # of the rest, the first ones; None: all
    shard_blocks: int = 512
    batch_size: int = 16
    stretch: int = 256
    field: str = "text"
    seed: int = 0


def build(
    folder: Path,
    texts: Sequence[Path | str],
    tokenizer: str,
    teacher: LanguageModel | None,
    settings: Settings,
    console: Console,
) -> blocks.Manifest:
    """A cache folder. Without a teacher: blocks alone, to train on labels."""
    if (folder / blocks.MANIFEST).exists():
        raise UserError(f"{folder} already holds a cache; remove it first or choose another folder")
    arrays, vocab_size = _read_blocks(texts, tokenizer, settings)
    known = None if teacher is None else _describe(teacher, settings)
    arrays, kept = _hold_out(arrays, settings)
    count = len(arrays["input_ids"])
    spans = {"train": (0, kept)} | ({"held_out": (kept, count)} if kept < count else {})
    manifest = blocks.Manifest(
        length=settings.length,
        vocab_size=vocab_size,
        tokenizer=tokenizer if tokenizer == tokens.BYTES else str(Path(tokenizer).absolute()),
        origin=f"{_origin(texts)}, {count * settings.length:,} tokens",
        masked="mask" in arrays,
        teacher=known,
    )
    content = hashlib.sha256(b"".join(x.tobytes() for x in arrays.values())).hexdigest()
    ours = {"blocks": content, "manifest": manifest.model_dump(mode="json")}
    begin(folder, ours | {"held_out": settings.held_out, "shard_blocks": settings.shard_blocks})
    total = count * manifest.block_bytes()
    sizes = ", ".join(f"{stop - start:,} {name}" for name, (start, stop) in spans.items())
    say(console, f"{folder}: {count:,} blocks of {settings.length} tokens ({sizes}), {size(total)}")
    ask = None if teacher is None else make_asker(teacher, settings)
    splits: dict[str, list[blocks.Shard]] = {}
    with counting(console, "blocks", count) as progress:
        for name, span in spans.items():
            splits[name] = [
                _shard(folder, f"{name}_{number:05d}.safetensors", arrays, start, stop, ask, settings, progress)
                for number, (start, stop) in enumerate(_cut(*span, settings.shard_blocks))
            ]
    manifest = manifest.model_copy(update={"splits": splits})
    blocks.write_manifest(folder, manifest)
    return manifest


def _origin(texts: Sequence[Path | str]) -> str:
    named = [str(text) for text in texts if hub_text.is_hub(str(text))]
    files = len(texts) - len(named)
    return ", ".join(named + ([f"{files} file{'s' if files > 1 else ''}"] if files else []))


def split_spans(count: int, held_out: float) -> dict[str, tuple[int, int]]:
    """Of each split its first block, and the one after its last; what is held out is at the end."""
    last = round(held_out * count) or (1 if held_out and count > 1 else 0)
    return {"train": (0, count - last)} | ({"held_out": (count - last, count)} if last else {})


def _cut(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, width):
        yield first, min(first + width, stop)


def _read_blocks(texts: Sequence[Path | str], tokenizer: str, settings: Settings) -> tuple[dict[str, np.ndarray], int]:
    """Documents in an order that the seed decides, so that the end of the text is a fair sample of it."""
    encoder = tokens.Tokenizer(tokenizer)
    encoded = tokens.encode((one for text in texts for one in _documents(text, settings.field)), encoder)
    order = np.random.default_rng(settings.seed).permutation(len(encoded.ends))
    return tokens.pack(encoded, order, settings.length), encoder.vocab_size


def _documents(text: Path | str, field: str) -> Iterator[tokens.Document]:
    if hub_text.is_hub(str(text)):
        return hub_text.read_documents(str(text), field)
    return tokens.read_documents(Path(text), field)


def _hold_out(arrays: dict[str, np.ndarray], settings: Settings) -> tuple[dict[str, np.ndarray], int]:
    """The blocks of both splits, and how many are to train on: those held out do not depend on that."""
    train = split_spans(len(arrays["input_ids"]), settings.held_out)["train"][1]
    kept = min(settings.blocks or train, train)
    return {name: np.concatenate([x[:kept], x[train:]]) for name, x in arrays.items()}, kept


def _describe(teacher: LanguageModel, settings: Settings) -> blocks.Teacher:
    if settings.topk > teacher.config.vocab_size:
        raise UserError(f"--topk {settings.topk}: the teacher has {teacher.config.vocab_size} tokens")
    return blocks.Teacher(name=teacher.name, topk=settings.topk, temperatures=list(settings.temperatures))


def begin(folder: Path, ours: dict[str, Any]) -> None:
    """A new folder, or one where the same was begun: a build that goes on must be the same build."""
    path = folder / SETTINGS
    if path.exists():
        try:
            theirs = json.loads(path.read_text())
        except ValueError:
            theirs = {}
        different = [name for name in ours if theirs.get(name) != ours[name]]
        if different:
            raise UserError(
                f"{folder} holds the beginning of another cache ({', '.join(different)} differ); build it with the "
                "same text and settings, remove it, or choose another folder"
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(ours).encode(), durable=True)


def _shard(
    folder: Path,
    file: str,
    arrays: dict[str, np.ndarray],
    start: int,
    stop: int,
    ask: Callable[[np.ndarray], dict[str, np.ndarray]] | None,
    settings: Settings,
    progress: Callable[[int], None],
) -> blocks.Shard:
    if (folder / file).exists():  # whole: it has its name only since it was
        progress(stop - start)
        return blocks.describe_shard(folder / file, file, stop - start)
    found: list[dict[str, np.ndarray]] = []
    for first, last in _cut(start, stop, settings.batch_size):
        if ask is not None:
            found.append(ask(arrays["input_ids"][first:last]))
        progress(last - first)
    taught = {name: np.concatenate([part[name] for part in found]) for name in found[0]} if found else {}
    return blocks.write_shard(folder, file, {name: x[start:stop] for name, x in arrays.items()} | taught)


def make_asker(teacher: LanguageModel, settings: Settings) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Blocks [n, L], n up to the batch size, to the teacher's top-K and normalisers; one program for all of them."""
    config, rows = teacher.config, sharding.over_batch(teacher.mesh)
    shards = sharding.num_batch_shards(teacher.mesh)
    batch_size = -(-settings.batch_size // shards) * shards
    placement = language_model.place(teacher)

    def answer(params: Any, ids_BL: Array) -> dict[str, Array]:
        params = qwen3.prepare(config, params)
        hidden = qwen3.apply(config, params, ids_BL, placement)[:, :-1]
        head = qwen3.head(config, params, placement)

        def one(part: Array) -> dict[str, Array]:
            # Less the largest, which is then exact: rounding it would move mass between the top K and the rest.
            logits = head(part)
            logits = logits - jnp.max(logits, axis=-1, keepdims=True)
            values, indices = jax.lax.top_k(logits, settings.topk)
            sums = [jax.nn.logsumexp(logits / t, axis=-1) for t in settings.temperatures]
            limit = float(jnp.finfo(jnp.float16).max)
            values = jnp.clip(values, -limit, limit).astype(jnp.float16)
            return {"topk_idx": indices, "topk_logits": values, "logz": jnp.stack(sums, axis=-1)}

        parts = jax.lax.map(one, distill_losses.cut(hidden, settings.stretch))
        return {name: distill_losses.join(x, hidden.shape[1]) for name, x in parts.items()}

    compiled = jax.jit(answer, out_shardings=sharding.replicated(teacher.mesh))

    def ask(ids: np.ndarray) -> dict[str, np.ndarray]:
        padded = np.pad(ids, ((0, batch_size - len(ids)), (0, 0)))
        answers = jax.device_get(compiled(teacher.params, sharding.put(padded, rows)))
        return {name: np.asarray(x)[: len(ids)] for name, x in answers.items()}

    return ask
