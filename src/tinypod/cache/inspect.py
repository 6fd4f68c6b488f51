"""What a cache holds, for a person."""

from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from tinypod.data import blocks, tokens
from tinypod.errors import DataError
from tinypod.runs.terminal import facts, size

SHOWN = 48  # tokens of the first block


def render(folder: Path, manifest: blocks.Manifest) -> RenderableType:
    found: list[tuple[str, str]] = []
    for name, shards in manifest.splits.items():
        count = manifest.count(name)
        found.append((name, f"{count:,} blocks, {count * manifest.length:,} tokens, {len(shards)} files"))
    total = sum(manifest.count(name) for name in manifest.splits)
    found.append(("a block", f"{manifest.length} tokens, {size(manifest.block_bytes())}"))
    found.append(("in all", size(total * manifest.block_bytes())))
    found.append(("tokenizer", f"{manifest.tokenizer}, {manifest.vocab_size:,} tokens"))
    found.append(("from", manifest.origin))
    if manifest.teacher is None:
        found.append(("teacher", "none: for training on labels"))
        return facts(found, str(folder))
    temperatures = ", ".join(f"{one:g}" for one in manifest.teacher.temperatures)
    normalisers = f"normalisers at T = {temperatures}" if temperatures else "no normalisers: task.kd=renormalised"
    found.append(("teacher", manifest.teacher.name))
    found.append(("of each position", f"the {manifest.teacher.topk} largest logits; {normalisers}"))
    return Group(facts(found, str(folder)), *_beginning(folder, manifest))


def _beginning(folder: Path, manifest: blocks.Manifest) -> list[Text]:
    """The first tokens of the first block, and how sure the teacher was of them."""
    split = next(iter(manifest.splits))
    first = blocks.Blocks(folder, manifest, split).read([0])
    ids = first["input_ids"][0, :SHOWN].tolist()
    right = first["topk_idx"][0, :, 0] == first["input_ids"][0, 1:]
    sure = f"of its first block the teacher has {right.mean():.1%} right"
    if "logz" in first:
        inside = np.exp(first["topk_logits"][0].astype(np.float32) - first["logz"][0, :, :1])
        sure += f", and {inside.sum(axis=-1).mean():.2%} of its mass in the {inside.shape[-1]} that are kept"
    try:
        begins = repr(tokens.Tokenizer(manifest.tokenizer).decode(ids))
    except DataError:  # an imported cache may only know its name
        begins = f"tokens {', '.join(map(str, ids[:12]))}"
    return [Text(f"begins: {begins}"), Text(sure)]
