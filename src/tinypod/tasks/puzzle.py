"""Puzzles solved by recursion with adaptive computation: each row of a batch stays until the model says that it has
finished, or its steps are used up; only then does the row take the next example.

A carry is a dict: `z`, `steps` [B], `halted` [B], and the row's `example` (`inputs` and `labels` [B, S], `identifiers`
[B]). Labels of IGNORED_LABEL are not scored.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError, model_validator
from rich.console import Console

from tinypod.config import Config
from tinypod.data import fetch, puzzles
from tinypod.data.views import IGNORED_LABEL, MOST_EXAMPLES, Sampler, View, device_arrays, draw_examples, sudoku_view
from tinypod.errors import ConfigError, DataError, first_message
from tinypod.models import trm
from tinypod.runs.storage import is_remote
from tinypod.sharding import ANYWHERE, Placement, replicated
from tinypod.tasks import puzzle_scores
from tinypod.tasks.feed import ResidentFeed
from tinypod.tasks.puzzle_schedule import (
    ConstantOrLinear,
    Stage,
    check_depth,
    check_order,
    curriculum_settings,
    cycles_of,
    describe_curriculum,
    exploration_settings,
    make_at_step,
)
from tinypod.tasks.puzzle_scores import ACCURACIES, score
from tinypod.tasks.puzzle_thinking import (
    TABLE,
    ThinkingConfig,
    Thought,
    disturb,
    make_think,
    stop_logit,
    sudoku_rules,
)
from tinypod.tasks.task import Draw, Evaluation, Task, TaskKind


class _Loss(Config):
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the target that is spread over all tokens


class Stablemax(_Loss):
    """Cross-entropy over s(x) = x + 1 above zero, 1 / (1 - x) below."""

    kind: Literal["stablemax"] = "stablemax"


class Softmax(_Loss):
    kind: Literal["softmax"] = "softmax"


class Halting(Config):
    max_steps: PositiveInt = 16
    exploration: ConstantOrLinear = 0.1  # share of rows made to think on for a random while


class PuzzleTaskConfig(Config):
    kind: Literal["puzzle"] = "puzzle"
    loss: Annotated[Stablemax | Softmax, Field(discriminator="kind")] = Stablemax()
    q_loss_weight: NonNegativeFloat = 0.5
    # HRM's Q-learning: a second head learns what going on is worth, from what both heads say one step later. Costs a
    # second forward pass.
    continue_loss: bool = False
    halting: Halting = Halting()
    state_noise: NonNegativeFloat = 0.0  # in training, added to z before each step: a std, where that of z is 1
    thinking: ThinkingConfig = ThinkingConfig()  # in evaluation
    curriculum: Annotated[list[Stage], Field(default=[])]  # then the model's own cycles; evaluation always has those

    @model_validator(mode="after")
    def _stages_follow(self) -> "PuzzleTaskConfig":
        check_order(self.curriculum)
        return self


class PuzzleDataConfig(Config):
    kind: Literal["puzzles"] = "puzzles"
    path: str  # a dataset folder that `tinypod data` made; gs://… is fetched once into the user's cache folder
    train_split: str = "train"
    eval_split: str = "test"
    train_rows: PositiveInt | None = None  # the first so many of the split, which is in random order; null: all
    augmentations: NonNegativeInt | Literal["endless"] = "endless"  # fixed views of a puzzle besides itself
    sampling: Literal["random", "epochs"] = "random"  # epochs: each puzzle once before any comes again
    reveal: NonNegativeInt = 0  # of a Sudoku's blank cells, given in training: a number up to this for each example
    # What the dataset will be: `tinypod plan` goes by it where none is at `path`, or `path` is in a bucket.
    expected: Annotated[puzzles.ExpectedSudoku | puzzles.ExpectedPlain, Field(discriminator="kind")] | None = None


class Opened(NamedTuple):
    """A dataset's folder on this host, and what it says of itself."""

    folder: Path
    info: puzzles.DatasetInfo


def open_data(config: Any, planned: bool, console: Console | None) -> Opened:
    data: PuzzleDataConfig = config.data
    absent = is_remote(data.path) or not (Path(data.path) / "dataset.json").exists()
    if planned and absent and data.expected is not None:
        return Opened(Path(data.path), data.expected.info(data.train_split))
    try:
        folder = fetch.local_dataset(data.path, console)
        return Opened(folder, puzzles.read_info(folder))
    except DataError as error:
        hint = "; or say what it will be, to plan without it: 'data.expected={kind: sudoku, rows: 1000}'"
        raise DataError(f"{error}{hint if planned else ''}") from None


def recall_data(config: Any, dataset: Any) -> Opened:
    return Opened(Path(config.data.path), described(dataset))


def described(dataset: Any) -> puzzles.DatasetInfo:
    """What `Task.dataset` says."""
    try:
        return puzzles.DatasetInfo.model_validate_json(json.dumps(dataset))
    except ValidationError as error:
        raise DataError(
            f"what is remembered of the dataset cannot be read ({first_message(error)}): it may be of a newer tinypod; "
            "update tinypod"
        ) from None


def build_task(config: Any, opened: Opened, placement: Placement = ANYWHERE) -> Task:
    model: trm.TrmConfig = config.model
    info, batch_size = opened.info, config.batch_size
    shape = trm.PuzzleShape(info.seq_len, info.vocab_size, info.num_identifiers)
    check_depth(config.task.curriculum, model)
    max_steps, continues = config.task.halting.max_steps, config.task.continue_loss
    has_table = isinstance(model.puzzle_embedding, trm.PuzzleTable)
    sampler = make_sampler(config.data, info)
    if sampler.epochs and config.steps * batch_size >= MOST_EXAMPLES:
        raise ConfigError(
            f"data.sampling=epochs counts up to {MOST_EXAMPLES:,} examples, and steps × batch_size are "
            f"{config.steps * batch_size:,}; lower one of them, or set data.sampling=random"
        )
    think = make_thinking(config.task, model, info, placement)

    def draw(arrays: dict[str, Array], draw: Draw, varied: dict[str, Array]) -> dict[str, Any]:
        example_key, explore_key, until_key = jax.random.split(draw.key, 3)
        explore = jax.random.bernoulli(explore_key, varied["exploration"], (batch_size,))
        until = jax.random.randint(until_key, (batch_size,), min(2, max_steps), max_steps + 1)
        batch = {
            "example": draw_examples(sampler, arrays, draw.number, example_key, draw.run_key, batch_size),
            "min_steps": jnp.where(explore, until, 0),
        }
        if config.task.state_noise:
            noise_key = jax.random.fold_in(draw.key, 3)  # beside the three above
            batch["noise"] = jax.random.bits(noise_key, (batch_size,), jnp.uint32)
        return batch

    def open_evaluation(split: str | None) -> Evaluation:
        held_out = puzzles.read_split(*opened, split or config.data.eval_split)
        copies = config.task.thinking.chains
        return puzzle_scores.evaluation(think, held_out, info.sources, copies=copies, continues=continues)

    def flops(training: bool) -> int:
        if training:
            return int(train_flops(config.task, model, shape, model.H_cycles, model.L_cycles))
        return trm.count_matmul_flops(model, shape, training=False) * max_steps * config.task.thinking.chains

    held_out, rules = info.splits.get(config.data.eval_split), trm.sharding_rules(model)
    return Task(
        init_params=lambda key: trm.init(model, shape, key),
        prepare=lambda params: params,
        lower=lambda prepared: prepared,
        init_carry=lambda params: fresh_carry(model, params, batch_size, info.seq_len),
        draw=draw,
        begin=lambda params, carry, batch: take_examples(model, params, carry, batch["example"]),
        lookup=lambda carry: {TABLE: carry["example"]["identifiers"]} if has_table else {},
        loss=make_loss(config.task, model, shape, placement),
        rules=rules,
        prepared_rules=rules,
        varied={
            "q_loss_weight": config.task.q_loss_weight,
            **exploration_settings(config.task.halting.exploration),
            **curriculum_settings(config.task.curriculum, model),
        },
        frozen=(r"z_init\..*",),
        tables=(TABLE,) if has_table else (),
        scaled=(),
        abstract_feed=lambda mesh: abstract_arrays(opened, config.data, mesh),
        open_feed=lambda mesh: ResidentFeed(mesh, device_arrays(read_training(opened, config.data))),
        open_evaluation=open_evaluation,
        fingerprint={name: split.sha256 for name, split in info.splits.items()},
        summarise=summarise,
        headline=puzzle_scores.HEADLINE,
        unit="puzzles",
        description=describe(config.task, model, info),
        train_rows=count_training(opened, config.data),
        held_out_rows=held_out.rows if held_out else None,
        flops=flops,
        matrices=trm.MATRICES,
        at_step=make_at_step(len(config.task.curriculum)),
        notes=describe_curriculum(config.task.curriculum, model),
        dataset=info.model_dump(mode="json"),
    )


def symmetries(info: puzzles.DatasetInfo) -> View | None:
    """Of these puzzles, where they are known."""
    if info.kind != "sudoku":
        return None
    assert info.box is not None
    return sudoku_view((info.box[0], info.box[1]), info.vocab_size)


def make_thinking(
    config: PuzzleTaskConfig, model: trm.TrmConfig, info: puzzles.DatasetInfo, placement: Placement, steps: int = 0
) -> Callable[[trm.Params, Array, Array], Thought]:
    """What evaluation and `solve` compute. `steps`: default as many as the config says."""
    thinking, view = config.thinking, symmetries(info)
    if thinking.views > 1 and view is None:
        raise ConfigError(
            f"task.thinking.views={thinking.views}: the puzzles are of kind {info.kind!r}, whose symmetries are not "
            "known; leave it out, or take several trajectories"
        )
    rules = None
    if thinking.choose == "valid":
        if info.box is None:
            raise ConfigError(
                f"task.thinking.choose=valid: the puzzles are of kind {info.kind!r}, whose rules are not known; choose "
                "vote, confident, first or settled"
            )
        rules = sudoku_rules((info.box[0], info.box[1]))
    steps = steps or config.halting.max_steps
    return make_think(model, thinking, view, steps, placement, continues=config.continue_loss, rules=rules)


def make_sampler(data: PuzzleDataConfig, info: puzzles.DatasetInfo) -> Sampler:
    """How training examples are drawn from this dataset."""
    view = symmetries(info)
    if view is None and data.augmentations not in ("endless", 0):
        raise ConfigError(
            f"data.augmentations={data.augmentations}: the puzzles in {data.path} are of kind {info.kind!r}, whose "
            "symmetries are not known; leave it out"
        )
    if info.grouped and data.sampling == "epochs":
        raise ConfigError(f"data.sampling=epochs: the puzzles in {data.path} come in groups; leave it out")
    if view is None and data.reveal:
        raise ConfigError(
            f"data.reveal={data.reveal}: the puzzles in {data.path} are of kind {info.kind!r}, and only a Sudoku's "
            "answer can be filled into it; leave it out"
        )
    if data.reveal >= info.seq_len:
        raise ConfigError(
            f"data.reveal={data.reveal}: expected fewer than the {info.seq_len} cells of a puzzle, such as 12"
        )
    augmentations = None if data.augmentations == "endless" else data.augmentations
    epochs = data.sampling == "epochs"
    return Sampler(view, augmentations, grouped=info.grouped, epochs=epochs, reveal=data.reveal)


def count_training(opened: Opened, data: PuzzleDataConfig) -> int:
    rows = puzzles.split_info(*opened, data.train_split).rows
    if data.train_rows is None:
        return rows
    if opened.info.grouped:
        raise ConfigError(f"data.train_rows={data.train_rows}: the puzzles in {data.path} come in groups; leave it out")
    if data.train_rows > rows:
        raise ConfigError(f"data.train_rows={data.train_rows}: {data.path} has only {rows} to train on")
    return data.train_rows


def read_training(opened: Opened, data: PuzzleDataConfig) -> puzzles.Split:
    split, rows = puzzles.read_split(*opened, data.train_split), count_training(opened, data)
    if rows == len(split):
        return split
    parts = {name: getattr(split, name)[:rows] for name in ("inputs", "labels", "identifiers", "sources", "ratings")}
    return puzzles.Split(**parts)


def abstract_arrays(
    opened: Opened, data: PuzzleDataConfig, mesh: Mesh | AbstractMesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of what the feed holds, of a dataset that may not be there; only the file knows how many groups it has."""
    rows = count_training(opened, data)
    cells: Any = ((rows, opened.info.seq_len), np.uint8)
    shapes = {"inputs": cells, "labels": cells, "identifiers": ((rows,), np.int32)}
    if opened.info.grouped:
        arrays = device_arrays(puzzles.read_split(*opened, data.train_split))
        shapes = {key: (x.shape, x.dtype) for key, x in arrays.items()}
    return {key: jax.ShapeDtypeStruct(*value, sharding=replicated(mesh)) for key, value in shapes.items()}


KIND = TaskKind(
    PuzzleTaskConfig,
    PuzzleDataConfig,
    trm.TrmConfig,
    open_data,
    build_task,
    changeable=(
        r"task\.(halting\.exploration|q_loss_weight|state_noise|curriculum|thinking)(\..*)?",
        r"data\.expected.*",
    ),
    varied=(r"task\.(halting\.exploration|q_loss_weight)",),
    resident=True,
    recall=recall_data,
)


def describe(config: PuzzleTaskConfig, model: trm.TrmConfig, info: puzzles.DatasetInfo) -> str:
    changed = {
        "normalised gate": model.gate == "normalised",
        "single z": model.single_z,
        "separate nets": model.separate_nets,
        "one-step gradient": model.one_step_gradient,
        "continue loss": config.continue_loss,
        "noise in the states": config.state_noise > 0,
    }
    parts = [f"{model.mixing.kind} mixing", *(name for name, on in changed.items() if on), model.dtype]
    return f"{', '.join(parts)}, puzzles of {info.seq_len} cells"


def train_flops(
    config: PuzzleTaskConfig, model: trm.TrmConfig, shape: trm.PuzzleShape, H_cycles: Any, L_cycles: Any
) -> Any:
    """Matrix products of one row in a training step of that depth, an integer or an array."""
    applications = trm.count_applications(model, H_cycles, L_cycles, training=True)
    if config.continue_loss:  # one more forward pass, whose answer is not read
        applications += trm.count_applications(model, H_cycles, L_cycles, training=False)
    net, head = trm.count_net_flops(model, shape), trm.count_head_flops(model, shape, training=True)
    return float(net) * applications + float(head)  # floats: more than an int32 of the program holds


def make_loss(
    config: PuzzleTaskConfig, model: trm.TrmConfig, shape: trm.PuzzleShape, placement: Placement
) -> Callable[..., Any]:
    def loss(
        params: trm.Params,
        table_rows: dict[str, Array],
        carry: dict[str, Any],
        batch: dict[str, Any],
        varied: dict[str, Array],
    ) -> tuple[Array, tuple[dict[str, Any], dict[str, Array]]]:
        cycles = cycles_of(varied) if config.curriculum else None
        tokens, rows = carry["example"]["inputs"], table_rows.get(TABLE)
        z = carry["z"]
        if config.state_noise:
            keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), batch["noise"])
            z = disturb(z, keys_B, config.state_noise)
        z, logits, q = trm.apply(model, params, z, tokens, rows, placement, cycles)
        scores = score(jnp.argmax(logits, axis=-1), q[:, 0], carry["example"]["labels"])
        lm_loss = _cell_losses(config, logits, carry["example"]["labels"])
        q_loss = optax.sigmoid_binary_cross_entropy(q[:, 0], scores["exact_accuracy"])
        q_losses = {"q_loss": jnp.sum(q_loss)}
        steps = carry["steps"] + 1
        last = steps >= config.halting.max_steps
        if config.continue_loss:
            fixed = jax.lax.stop_gradient((params, rows))
            next_q = trm.apply(model, fixed[0], z, tokens, fixed[1], placement, cycles, gradients=False)[2]
            worth = jax.nn.sigmoid(jnp.where(last, next_q[:, 0], jnp.max(next_q, axis=-1)))
            q_losses["q_continue_loss"] = jnp.sum(optax.sigmoid_binary_cross_entropy(q[:, 1], worth))
        total = jnp.sum(lm_loss) + varied["q_loss_weight"] * sum(q_losses.values())

        halted = last | ((stop_logit(q, continues=config.continue_loss) > 0) & (steps >= batch["min_steps"]))
        finished = (halted & (scores["labelled"] > 0)).astype(jnp.float32)
        sums = {name: jnp.sum(scores[name] * finished) for name in ACCURACIES} | {
            "loss": total,
            "weight": jnp.float32(steps.shape[0]),
            "lm_loss": jnp.sum(lm_loss),
            **q_losses,
            "finished": jnp.sum(finished),
            "steps": jnp.sum(steps.astype(jnp.float32) * finished),
        }
        if cycles is not None:
            flops = train_flops(config, model, shape, *(x.astype(jnp.float32) for x in cycles))
            of_row = {"H_cycles": varied["H_cycles"], "L_cycles": varied["L_cycles"], "flops": flops}
            sums |= {name: value * sums["weight"] for name, value in of_row.items()}
        return total, ({"z": z, "steps": steps, "halted": halted, "example": carry["example"]}, sums)

    return loss


def fresh_carry(model: trm.TrmConfig, params: trm.Params, batch_size: int, seq_len: int) -> dict[str, Any]:
    """A carry in which every row has halted, so that all take an example at the first step."""
    blank = jnp.zeros((batch_size, seq_len), jnp.int32)
    zeros = jnp.zeros((batch_size,), jnp.int32)
    return {
        "z": trm.initial_z(model, params, batch_size, seq_len),
        "steps": zeros,
        "halted": jnp.ones((batch_size,), bool),
        "example": {"inputs": blank, "labels": blank, "identifiers": zeros},
    }


def take_examples(
    model: trm.TrmConfig, params: trm.Params, carry: dict[str, Any], example: dict[str, Array]
) -> dict[str, Any]:
    """Rows that halted take the new example and start afresh; the others keep theirs."""
    halted = carry["halted"]

    def select(new: Array, old: Array) -> Array:
        return jnp.where(halted.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    start = trm.initial_z(model, params, *example["inputs"].shape)
    return {
        "z": jax.tree.map(select, start, carry["z"]),
        "steps": jnp.where(halted, 0, carry["steps"]),
        "halted": jnp.zeros_like(halted),
        "example": jax.tree.map(select, example, carry["example"]),
    }


def summarise(sums: Mapping[str, float]) -> dict[str, float]:
    """Losses are means over all rows; scores are means over the rows that finished, if any did."""
    of_rows = ("loss", "lm_loss", "q_loss", "q_continue_loss", "H_cycles", "L_cycles")  # the last three: in some runs
    metrics = {name: sums[name] / sums["weight"] for name in of_rows if name in sums}
    if sums["finished"]:
        metrics |= {name: sums[name] / sums["finished"] for name in (*ACCURACIES, "steps")}
    return metrics


def _cell_losses(config: PuzzleTaskConfig, logits_BSV: Array, labels_BS: Array) -> Array:
    """Per row: mean cross-entropy over its labelled cells, in float32."""
    x = logits_BSV.astype(jnp.float32)
    labelled = labels_BS != IGNORED_LABEL
    target = jax.nn.one_hot(jnp.where(labelled, labels_BS, 0), x.shape[-1], dtype=jnp.float32)
    if isinstance(config.loss, Stablemax):
        log_s = jnp.sign(x) * jnp.log1p(jnp.abs(x))  # log of x + 1, or of 1 / (1 - x)
        log_p = log_s - jax.nn.logsumexp(log_s, axis=-1, keepdims=True)
    else:
        log_p = jax.nn.log_softmax(x, axis=-1)
    if smoothing := config.loss.label_smoothing:
        target = target * (1 - smoothing) + smoothing / x.shape[-1]
    cells = -jnp.sum(target * log_p, axis=-1) * labelled.astype(jnp.float32)
    return jnp.sum(cells, axis=-1) / jnp.maximum(jnp.sum(labelled, axis=-1), 1).astype(jnp.float32)
