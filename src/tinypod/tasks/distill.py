"""A language model trained on blocks of tokens: towards a teacher's cached logits, towards labels, or both.

What is trained follows from the model: its adapters if it has any, else the factors of its low-bit weights (and those
weights, if straight through), else all of it. The loss is a sum over tokens, divided by how many counted. A block's
last token is predicted, its first is not.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from rich.console import Console

from tinypod.config import Config
from tinypod.data import blocks
from tinypod.data.tokens import Tokenizer, read_documents
from tinypod.errors import ConfigError, DataError
from tinypod.models import qwen3
from tinypod.sharding import ANYWHERE, Placement, over_batch
from tinypod.tasks.anchors import Anchor, Anchors, check_anchors, open_anchors
from tinypod.tasks.distill_losses import KD, row_sums
from tinypod.tasks.feed import HostFeed
from tinypod.tasks.task import Evaluation, Metric, Task, TaskKind

TEXT = "text"  # the split that is a text file, read through a sliding window
WITH_TEACHER = (
    Metric("kd_loss", "KD loss", "min", ".4f"),
    Metric("perplexity", "perplexity", "min", ".3f"),
    Metric("agreement", "agrees", "max", ".2%"),
)
WITHOUT_TEACHER = (Metric("perplexity", "perplexity", "min", ".3f"), Metric("label_accuracy", "right", "max", ".2%"))
Share = Annotated[float, Field(ge=0, le=1)]


class Trained(Config):
    """Factors of the updates, 0 for what is not to move now. Changing them for a later stage compiles nothing."""

    mlp: Share = 1.0
    attention: Share = 1.0
    factors: Share = 1.0  # A and B of low-bit weights
    magnitudes: Share = 1.0  # their g
    weights: Share = 1.0  # of linear layers: plain, or low-bit ones that are trained straight through


class DistillTaskConfig(Config):
    kind: Literal["distill"] = "distill"
    kd: KD = "tail"
    temperature: PositiveFloat = 1.0
    kd_weight: NonNegativeFloat = 1.0
    top1_weight: NonNegativeFloat = 0.0  # cross-entropy with the teacher's most likely token
    label_weight: NonNegativeFloat = 0.0  # cross-entropy with the text itself
    train: Trained = Trained()
    anchor: Anchor | None = None  # rows that hold the student near what it was
    stretch: PositiveInt = 256  # positions whose logits are there at a time


class BlocksDataConfig(Config):
    kind: Literal["blocks"] = "blocks"
    path: str  # a folder that `tinypod cache build` made
    train_split: str = "train"
    eval_split: str = "held_out"
    text: str | None = None  # a file whose perplexity `tinypod eval --split text` measures
    window: PositiveInt = 1024
    stride: PositiveInt = 512  # tokens scored of each window: those that the one before it did not have
    expected: blocks.ExpectedBlocks | None = None  # for `tinypod plan`, where there are none at `path` yet


class Opened(NamedTuple):
    folder: Path
    manifest: blocks.Manifest
    anchors: Anchors | None = None


def open_data(config: Any, planned: bool, console: Console | None) -> Opened:
    data: BlocksDataConfig = config.data
    folder, expected = Path(data.path), data.expected
    if planned and expected is not None and not (folder / blocks.MANIFEST).exists():
        made = expected.manifest(data.train_split, data.eval_split, config.model.vocab_size)
        return Opened(folder, made, open_anchors(config.task.anchor, made, planned))
    try:
        found = blocks.read_manifest(folder)
    except DataError as error:
        hint = "; or say what they will be, to plan without them: 'data.expected={length: 1024, topk: 128}'"
        raise DataError(f"{error}{hint if planned else ''}") from None
    return Opened(folder, found, open_anchors(config.task.anchor, found, planned))


def recall_data(config: Any, dataset: Any) -> Opened:
    return Opened(Path(config.data.path), blocks.Manifest.model_validate_json(json.dumps(dataset)))


def frozen(model: qwen3.Qwen3Config) -> tuple[str, ...]:
    if model.lora is not None:
        return (r"(?!.*\.lora_[AB]$).*",)
    return (r"(?!.*\.(A|B|g|latent)$).*",) if model.quantisation is not None else ()


# Parameters whose updates a setting multiplies.
SCALED = (
    (r"layers\.mlp\..*", "mlp"),
    (r"layers\.attention\..*", "attention"),
    (r".*\.[AB]", "factors"),
    (r".*\.g", "magnitudes"),
    (r".*\.(weight|latent)", "weights"),
)


def check(config: Any, opened: Opened) -> None:
    task, model, manifest = config.task, config.model, opened.manifest
    if manifest.vocab_size > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size}: the tokens of {opened.folder} go up to {manifest.vocab_size}"
        )
    teacher = manifest.teacher
    if teacher is None and (task.kd_weight or task.top1_weight):
        raise ConfigError(
            f"{opened.folder} has no teacher's logits: build it with --teacher, or train on the text alone: "
            "task.kd_weight=0 task.top1_weight=0 task.label_weight=1"
        )
    if teacher is not None and task.kd == "tail" and not teacher.temperatures:
        raise ConfigError(
            f"task.kd=tail: {opened.folder} was imported, and has no normalisers of the teacher's logits; use "
            "task.kd=renormalised, or make a cache with `tinypod cache build`"
        )
    if teacher is not None and task.kd == "tail" and task.temperature not in teacher.temperatures:
        known = ", ".join(f"{one:g}" for one in teacher.temperatures)
        raise ConfigError(
            f"task.temperature={task.temperature:g}: {opened.folder} has the normalisers of {known}; choose one of "
            "them, or build it with that --temperature"
        )
    if not (task.kd_weight or task.top1_weight or task.label_weight):
        raise ConfigError("task: every weight of the loss is 0; set kd_weight, top1_weight or label_weight")
    if model.weight_dtype != "float32" and not frozen(model):
        raise ConfigError("model.weight_dtype=bfloat16 is for frozen weights: set model.lora or model.low_bit")
    if opened.anchors is not None:
        check_anchors(opened.anchors, opened.folder, manifest, config.batch_size)


def build_task(config: Any, opened: Opened, placement: Placement = ANYWHERE) -> Task:
    check(config, opened)
    model, task, data = config.model, config.task, config.data
    manifest, anchors, batch_size = opened.manifest, opened.anchors, config.batch_size
    weights = {"kd_loss": "kd_weight", "top1_loss": "top1_weight", "label_loss": "label_weight"}

    def sums_of(params: Any, batch: dict[str, Array], parts: int | None) -> dict[str, Array]:
        def of_rows(hidden: Array, rows: dict[str, Array]) -> dict[str, Array]:
            known, mask = split_batch(manifest, task, rows)
            weight = qwen3.head_weight(model, params, placement)
            sums = row_sums(hidden[:, :-1], weight, known, mask, task.stretch, task.kd, task.temperature)
            sums = split_anchors(sums, rows["anchor"]) if "anchor" in rows else sums
            counted = rows.get("count", jnp.ones(len(hidden)))
            return {name: jnp.sum(x * counted) for name, x in sums.items()} | {"count": jnp.sum(counted)}

        return over_stages(model, params, batch, parts, placement, of_rows)

    def loss(params: Any, table_rows: Any, carry: Any, batch: Any, varied: dict[str, Array]) -> Any:
        sums = sums_of(params, batch, config.accumulation)
        total = sum(varied[weight] * sums[name] for name, weight in weights.items() if name in sums)
        if "anchor_loss" in sums:
            total += varied["anchor_weight"] * sums["anchor_loss"]
        return total, (carry, sums | {"loss": total, "weight": sums["tokens"]})

    def score(params: Any, batch: dict[str, Array]) -> dict[str, Array]:
        return sums_of(qwen3.lower(model, qwen3.prepare(model, params)), batch, None)

    def open_evaluation(split: str | None) -> Evaluation:
        if split == TEXT:
            return sliding_window(config, opened, score)
        held_out = blocks.Blocks(opened.folder, manifest, split or data.eval_split)
        return Evaluation(len(held_out), lambda start, stop: held_out.read(range(start, stop)), score, evaluated)

    def open_feed(mesh: Mesh) -> HostFeed:
        split = blocks.Blocks(opened.folder, manifest, data.train_split)
        if anchors is None:
            return HostFeed(mesh, batch_size, make_reader(split, config.seed, batch_size))
        read = make_reader(split, config.seed, anchors.rows_to_train(batch_size))
        return HostFeed(mesh, batch_size, anchors.mix(read, manifest, batch_size))

    def abstract_feed(mesh: Mesh | AbstractMesh) -> dict[str, jax.ShapeDtypeStruct]:
        rows = over_batch(mesh)
        shapes = manifest.shapes() if anchors is None else anchors.shapes(manifest)
        return {k: jax.ShapeDtypeStruct((batch_size, *s), d, sharding=rows) for k, (s, d) in shapes.items()}

    def flops(training: bool) -> int:
        trains_weights = model.lora is None
        return qwen3.count_matmul_flops(model, manifest.length, training=training, trains_weights=trains_weights)

    low = f", low-bit {model.low_bit}" if isinstance(model.low_bit, str) else ", low-bit" if model.low_bit else ""
    low += f" ({qwen3.bits_per_weight(model):.2f} bits per weight of its linear layers)" if model.low_bit else ""
    low += ", straight-through" if model.straight_through else ""
    adapters = f", LoRA of rank {model.lora.rank}" if model.lora else ""
    return Task(
        init_params=lambda key: qwen3.init(model, key),
        prepare=lambda params: qwen3.prepare(model, params),
        lower=lambda prepared: qwen3.lower(model, prepared),
        init_carry=lambda params: {},
        draw=lambda feed, draw, varied: feed,
        begin=lambda params, carry, batch: carry,
        lookup=lambda carry: {},
        loss=loss,
        rules=qwen3.sharding_rules(model),
        prepared_rules=qwen3.sharding_rules(model, prepared=True),
        varied={name: getattr(task, name) for name in weights.values()}
        | task.train.model_dump()
        | ({"anchor_weight": task.anchor.weight} if task.anchor else {}),
        frozen=frozen(model),
        tables=(),
        scaled=SCALED,
        abstract_feed=abstract_feed,
        open_feed=open_feed,
        open_evaluation=open_evaluation,
        fingerprint=fingerprint(manifest)
        | ({f"anchors/{k}": v for k, v in fingerprint(anchors.manifest).items()} if anchors else {}),
        summarise=summarise,
        headline=WITHOUT_TEACHER if manifest.teacher is None else WITH_TEACHER,
        unit="blocks",
        description=f"Qwen3{low}{adapters}, {model.dtype}, blocks of {manifest.length} tokens",
        train_rows=manifest.count(data.train_split) if data.train_split in manifest.splits else 0,
        held_out_rows=manifest.count(data.eval_split) if data.eval_split in manifest.splits else None,
        flops=flops,
        dataset=manifest.model_dump(mode="json"),
    )


def over_stages(
    model: qwen3.Qwen3Config,
    params: Any,
    batch: dict[str, Array],
    parts: int | None,
    placement: Placement,
    of_rows: Callable[[Array, dict[str, Array]], dict[str, Array]],
) -> dict[str, Array]:
    """Sums over a batch, from hidden states and rows; of the stages of a pipeline, each computes those of its share,
    part by part. `parts` that the batch is cut into there; None: one for each stage."""
    stages = qwen3.num_stages(model, params)
    if stages == 1:
        return of_rows(qwen3.apply(model, params, batch["input_ids"], placement), batch)
    # As the step cuts a batch into parts: every device of the `fsdp` axis has its share of each.
    cut = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, parts or stages, *x.shape[1:]), 0, 1), batch)
    hidden = qwen3.apply_in_stages(model, params, cut["input_ids"], placement)
    first = jax.lax.axis_index("pipeline") * len(hidden)
    mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, len(hidden)), cut)
    sums = jax.lax.map(lambda part: of_rows(*part), (hidden, mine))
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)


def split_batch(manifest: blocks.Manifest, task: DistillTaskConfig, batch: dict[str, Array]) -> tuple[Any, Array]:
    """What is known of each position but a block's last, and whether it counts."""
    known = {"labels": batch["input_ids"][:, 1:]}
    mask = batch.get("mask", jnp.ones_like(batch["input_ids"]))[:, 1:]
    if manifest.teacher is not None and "topk_idx" in batch:
        known |= {"topk_idx": batch["topk_idx"], "topk_logits": batch["topk_logits"]}
        if task.kd == "tail":
            known["logz"] = batch["logz"][..., manifest.teacher.temperatures.index(task.temperature)]
    return known, mask


def split_anchors(by_row: dict[str, Array], anchor_B: Array) -> dict[str, Array]:
    """Every term without the anchors' rows, and theirs, which is none of the others."""
    held = {"anchor_loss": by_row["kd_loss"] * anchor_B, "anchor_tokens": by_row["tokens"] * anchor_B}
    return {name: x * (1 - anchor_B) for name, x in by_row.items()} | held


def make_reader(split: blocks.Blocks, seed: int, batch_size: int) -> Any:
    """Every block once an epoch, in an order that the seed decides, whatever hosts there are."""
    if len(split) < batch_size:
        raise ConfigError(f"batch_size={batch_size}: {split.folder} has only {len(split)} blocks to train on")
    orders: dict[int, np.ndarray] = {}

    def read(number: int, start: int, stop: int) -> Mapping[str, np.ndarray]:
        places = np.arange(number * batch_size + start, number * batch_size + stop)
        wanted = np.empty(len(places), np.int64)
        for epoch in np.unique(places // len(split)):
            if int(epoch) not in orders:
                if len(orders) > 2:
                    orders.clear()
                orders[int(epoch)] = blocks.shuffled(seed, int(epoch), len(split))
            of_epoch = places // len(split) == epoch
            wanted[of_epoch] = orders[int(epoch)][places[of_epoch] % len(split)]
        return split.read(wanted)

    return read


def summarise(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over the tokens that counted; the anchors' over theirs."""
    names = [name for name in sums if name.endswith(("_loss", "accuracy")) or name in ("loss", "agreement")]
    metrics = {name: float(sums[name] / sums["tokens"]) for name in names}
    if sums.get("anchor_tokens"):
        metrics["anchor_loss"] = float(sums["anchor_loss"] / sums["anchor_tokens"])
    return metrics | {"perplexity": float(np.exp(min(metrics["label_loss"], 80.0)))}


def evaluated(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
    return summarise({name: float(x) for name, x in sums.items()}) | {"count": float(sums["count"])}


def fingerprint(manifest: blocks.Manifest) -> dict[str, str]:
    return {
        name: hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
        for name, shards in manifest.splits.items()
    }


def sliding_window(config: Any, opened: Opened, score: Callable[..., dict[str, Array]]) -> Evaluation:
    """Perplexity of a text file: windows that overlap, of each the tokens scored that the one before did not have."""
    data = config.data
    if data.text is None:
        raise ConfigError("data.text: --split text needs a file, e.g. data.text=wiki.test.txt")
    if data.stride > data.window:
        raise ConfigError(
            f"data.stride={data.stride} must be at most data.window={data.window}, or tokens are left out"
        )
    tokenizer = Tokenizer(opened.manifest.tokenizer)
    tokens = np.asarray(
        [
            i
            for document in read_documents(Path(data.text))
            for part in document.parts
            for i in tokenizer.encode(part[0])
        ],
        np.int32,
    )
    if len(tokens) < 2:
        raise DataError(f"data.text={data.text}: no text in it")
    # As if window k ended after (k + 1) strides; the first scores what it has but its first token.
    ends = np.arange(data.stride, len(tokens) + data.stride, data.stride).clip(max=len(tokens))

    def read(start: int, stop: int) -> dict[str, np.ndarray]:
        ids = np.zeros((stop - start, data.window), np.int32)
        mask = np.zeros((stop - start, data.window), np.uint8)
        for row, end in enumerate(ends[start:stop]):
            first = max(0, end - data.window)
            new = max(1, int(ends[start + row - 1])) if start + row else 1
            ids[row, : end - first] = tokens[first:end]
            mask[row, new - first : end - first] = 1
        return {"input_ids": ids, "mask": mask}

    return Evaluation(len(ends), read, score, evaluated)


KIND = TaskKind(
    DistillTaskConfig,
    BlocksDataConfig,
    qwen3.Qwen3Config,
    open_data,
    build_task,
    changeable=(
        r"task\.(kd_weight|top1_weight|label_weight|train\..*|anchor\.(weight|path))",
        r"data\.(text|window|stride)",
    ),
    varied=(r"task\.(kd_weight|top1_weight|label_weight|train\..*|anchor\.weight)",),
    resident=False,
    recall=recall_data,
)
