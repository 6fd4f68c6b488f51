"""A second task, to show that a task is one file: the next byte of a text that is repeated for ever.

It is unlike puzzles wherever a task may be: batches are read on the hosts, the loss is weighted by tokens, there is no
carry and no table, and one leaf inside a trained group is frozen. Shape letters: B rows, L tokens, D width, V bytes.
"""

import hashlib
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from pydantic import PositiveInt

from tinypod.config import Config
from tinypod.errors import DataError
from tinypod.sharding import over_batch
from tinypod.tasks.feed import HostFeed
from tinypod.tasks.task import Evaluation, Metric, Task, TaskKind

V = 128


class NextByte(Config):
    kind: Literal["next_byte"] = "next_byte"


class Text(Config):
    kind: Literal["text"] = "text"
    path: str
    length: PositiveInt = 8


class TwoLayers(Config):
    kind: Literal["two_layers"] = "two_layers"
    width: PositiveInt = 16
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


def open_text(config: Any, planned: bool, console: Any) -> bytes:
    if planned and not Path(config.data.path).exists():
        return bytes(range(97, 123))
    try:
        return Path(config.data.path).read_bytes()
    except FileNotFoundError:
        raise DataError(f"data.path: no text at {config.data.path}") from None


def init(width: int, key: jax.Array) -> Any:
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (V, width)),
        "layers": {"weight": jax.random.normal(keys[1], (2, width, width)) / width**0.5, "scale": jnp.ones((2, width))},
        "head": jax.random.normal(keys[2], (width, V)) / width**0.5,
    }


RULES = [
    (r"embed", PartitionSpec(None, "fsdp")),
    (r"layers\.weight", PartitionSpec(None, "fsdp", "tensor")),
    (r"layers\.scale", PartitionSpec()),
    (r"head", PartitionSpec("fsdp")),
]


def apply(params: Any, tokens_BL: jax.Array, dtype: str, gather: Any) -> jax.Array:
    if gather is not None:
        params = {name: gather(name, value) for name, value in params.items()}
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    x_BLD = jax.nn.one_hot(tokens_BL, V, dtype=dtype) @ params["embed"]
    for weight, scale in zip(params["layers"]["weight"], params["layers"]["scale"], strict=True):
        before_BLD = jnp.pad(x_BLD, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x_BLD = x_BLD + jnp.tanh((x_BLD + before_BLD) @ weight) * scale[None, None]
    return (x_BLD @ params["head"]).astype(jnp.float32)


def token_sums(logits_BLV: jax.Array, batch: Any) -> dict[str, jax.Array]:
    """By row."""
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits_BLV), batch["targets"][..., None], axis=-1)[..., 0]
    right = (jnp.argmax(logits_BLV, axis=-1) == batch["targets"]).astype(jnp.float32)
    mask = batch["mask"]
    return {name: jnp.sum(x * mask, axis=-1) for name, x in (("loss", -log_p), ("right", right), ("weight", mask))}


def summarise(sums: Any) -> dict[str, float]:
    return {"loss": float(sums["loss"] / sums["weight"]), "accuracy": float(sums["right"] / sums["weight"])}


def build(config: Any, text: bytes, placement: Any) -> Task:
    length, batch_size, model, gather = config.data.length, config.batch_size, config.model, placement.gather
    content = np.frombuffer(text, np.uint8).astype(np.int32)

    def blocks(first: int, stop: int, seed: int) -> dict[str, np.ndarray]:
        """Each row is another stretch of the text; rows differ in how many of their tokens count."""
        ids = np.arange(first, stop)
        places = (ids[:, None] * 5 + seed + np.arange(length + 1)) % len(content)
        tokens = content[places]
        mask = (np.arange(length)[None] < 2 + ids[:, None] % (length - 1)).astype(np.float32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}

    def read(number: int, start: int, stop: int) -> dict[str, np.ndarray]:
        return blocks(number * batch_size + start, number * batch_size + stop, 0)

    def abstract_feed(mesh: Any) -> Any:
        rows = over_batch(mesh)
        return {
            name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype, sharding=rows)
            for name, x in blocks(0, 1, 0).items()
        }

    def loss(params: Any, rows: Any, carry: Any, batch: Any, varied: Any) -> Any:
        sums = {
            name: jnp.sum(x)
            for name, x in token_sums(apply(params, batch["tokens"], model.dtype, gather), batch).items()
        }
        return sums["loss"], (carry, sums)

    def score(params: Any, batch: Any) -> Any:
        sums = token_sums(apply(params, batch["tokens"], model.dtype, gather), batch)
        return {name: jnp.sum(x * batch["count"]) for name, x in sums.items()} | {"count": jnp.sum(batch["count"])}

    return Task(
        init_params=lambda key: init(model.width, key),
        prepare=lambda params: params,
        lower=lambda prepared: prepared,
        init_carry=lambda params: {},
        draw=lambda feed, draw, varied: feed,
        begin=lambda params, carry, batch: carry,
        lookup=lambda carry: {},
        loss=loss,
        rules=RULES,
        prepared_rules=RULES,
        varied={},
        frozen=(r"layers\.scale",),
        tables=(),
        scaled=(),
        abstract_feed=abstract_feed,
        open_feed=lambda mesh: HostFeed(mesh, batch_size, read),
        open_evaluation=lambda split: Evaluation(
            rows=21,
            read=lambda start, stop: blocks(start, stop, 3),
            score=score,
            summarise=lambda sums: summarise(sums) | {"count": float(sums["count"])},
        ),
        fingerprint={"text": hashlib.sha256(text).hexdigest()},
        summarise=summarise,
        headline=(Metric("loss", "loss", "min", ".3f"), Metric("accuracy", "right", "max", ".1%")),
        unit="blocks",
        description=f"bytes, {model.dtype}",
        train_rows=len(content),
        held_out_rows=21,
        flops=lambda training: (6 if training else 2) * length * model.width * (2 * model.width + 2 * V),
    )


KIND = TaskKind(NextByte, Text, TwoLayers, open_text, build, changeable=(), varied=(), resident=False)
