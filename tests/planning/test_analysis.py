"""What a compiled step needs and does, on CPU devices: memory by its parts, donation, collectives."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fixtures import tiny_config, write_4x4
from tinypod import experiment, step
from tinypod.planning import analysis
from tinypod.planning.hlo import program as hlo


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("analysis") / "data")


def built_for(data: Path, *overrides: str, devices: int = 8) -> experiment.Experiment:
    return experiment.build(tiny_config(data, *overrides), jax.devices()[:devices])


def size(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_the_state_is_measured_to_the_byte(data: Path) -> None:
    built = built_for(data, "mesh={data: 2, fsdp: 4}")
    found, compiled = analysis.analyse(built)
    state, feed = built.init(), built.task.open_feed(built.mesh)(0)
    shards = jax.tree.map(lambda x: x.addressable_shards[0].data, state)
    memory = found.memory
    assert memory.weights == size(shards.params) < size(state.params)
    assert memory.optimizer == size(shards.opt_state)
    assert memory.averages == size(shards.ema)
    assert memory.carry == size(shards.carry) == size(state.carry) // 8
    assert memory.data == size(feed)
    assert sum(memory.parts().values()) == memory.needed
    sizes = compiled.memory_analysis()
    assert memory.needed >= sizes.argument_size_in_bytes + sizes.temp_size_in_bytes > memory.state
    assert 0 < memory.activations <= analysis.kept_for_backward(built)
    assert memory.temporaries > 0
    assert compiled(state, built.put_settings(), built.put(np.int32(0)), feed)[0].step == 1


def test_what_the_backward_pass_keeps_shrinks_as_it_should(data: Path) -> None:
    kept = {
        name: analysis.kept_for_backward(built_for(data, *overrides))
        for name, overrides in {
            "plain": (),
            "remat": ("model.remat=true",),
            "two parts": ("accumulation=2",),
            "looped": ("model.unroll=true",),
        }.items()
    }
    assert kept["remat"] < kept["plain"] / 2
    assert kept["two parts"] == pytest.approx(kept["plain"] / 2, rel=0.05)
    assert kept["looped"] == pytest.approx(kept["plain"], rel=0.05)  # loops stack what unrolled code keeps one by one
    one = analysis.kept_for_backward(built_for(data, devices=1))
    assert one == pytest.approx(8 * kept["plain"], rel=0.05)


def test_one_reduction_of_gradients_and_nothing_else_of_weight(data: Path) -> None:
    """Cycles, layers and parts of the batch do not make it more than one."""
    built = built_for(data, "model.H_cycles=2", "model.L_cycles=3", "accumulation=2", "model.dtype=bfloat16")
    program = hlo.read(analysis.analyse(built)[1].as_text(), dict(built.mesh.shape))
    trained = size(
        jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), step.select_trained(built.task, built.abstract_state.params))
    )
    sent = sum(one.runs * one.payload_bytes for one in program.collectives if one.op == "all-reduce")
    assert trained <= sent < 1.1 * trained + 4096
    gradients = [one for one in program.collectives if one.payload_bytes > 4096]
    assert gradients
    assert all(one.op == "all-reduce" and one.axes == ("data",) and one.runs == 1 for one in gradients), gradients
    assert not any(shape.startswith("bf16") for one in gradients for shape in one.shapes)


@pytest.mark.slow
def test_an_accidental_gather_of_activations_is_seen(data: Path) -> None:
    """The check above can fail: here the loss asks for whole logits on every device."""
    built = built_for(data)
    rows = tiny_config(data).batch_size

    def whole(params, table_rows, carry, batch, varied):
        carry = carry | {
            "z": jax.tree.map(lambda x: jax.lax.all_gather(x, "data", tiled=True)[: x.shape[0]], carry["z"])
        }
        return built.task.loss(params, table_rows, carry, batch, varied)

    bad = step.make_train_step(
        dataclasses.replace(built.task, loss=whole), built.optimizer, 1, True, built.mesh, built.specs
    )
    replicated = NamedSharding(built.mesh, PartitionSpec())
    jitted = jax.jit(
        bad,
        in_shardings=(built.state_shardings, replicated, replicated, None),
        out_shardings=(built.state_shardings, replicated),
    )
    text = jitted.lower(*built.abstract_inputs).compile().as_text()
    program = hlo.read(text, dict(built.mesh.shape))
    gathers = [one for one in program.collectives if one.op == "all-gather" and one.axes == ("data",)]
    assert sum(one.payload_bytes for one in gathers) >= 2 * rows * 16 * 16 * 4
    assert not program.aliased  # nor is anything donated here


def test_the_state_is_donated_and_nothing_unwanted_is_in_the_step(data: Path) -> None:
    found, _ = analysis.analyse(built_for(data))
    work = found.work
    assert work is not None
    state = len(jax.tree.leaves(built_for(data).abstract_state))
    assert len(work.aliased) >= state - 1  # all but what the step does not change
    assert work.unwanted == ()
    assert work.notes() == []


@pytest.mark.slow
def test_products_are_those_of_the_model(data: Path) -> None:
    built = built_for(data, "model.H_cycles=2", "model.L_cycles=2")
    found, _ = analysis.analyse(built)
    assert found.work is not None
    model = built.task.flops(True) * built.config.batch_size
    assert 8 * found.work.flops == pytest.approx(model, rel=0.1)  # the embedding by a product is not the model's
    remat, _ = analysis.analyse(built_for(data, "model.H_cycles=2", "model.L_cycles=2", "model.remat=true"))
    assert remat.work is not None
    assert remat.work.flops > 1.1 * found.work.flops
