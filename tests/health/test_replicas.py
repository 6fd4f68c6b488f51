"""Copies that differ by one bit are found, wherever they are, and healthy ones pass."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tinypod.errors import CorruptionError
from tinypod.health.replicas import make_replica_check

AXES = ("data", "fsdp", "tensor")
P = PartitionSpec
SPECS = {"embed": {"w": P()}, "mlp": {"up": P("fsdp", "tensor"), "down": P(("fsdp", "tensor"))}, "on": P()}


def make_mesh(*sizes: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), AXES)


def values() -> dict:
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
    up = draw(8, 8).astype(jax.numpy.bfloat16)
    return {"embed": {"w": draw(5, 3)}, "mlp": {"up": up, "down": draw(8, 2)}, "on": np.array([True, False])}


def put(mesh: Mesh, specs=SPECS):
    put_one = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(put_one, values(), specs)


def flip_a_bit(x: jax.Array, *devices: jax.Device) -> jax.Array:
    """The same array, with the lowest bit of one element different in the copies on some devices."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device in devices:
            data.reshape(-1).view(np.uint8)[0] ^= 1
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 8, 1), (4, 1, 2), (1, 1, 1)])
def test_healthy_copies_pass(sizes):
    mesh = make_mesh(*sizes)
    make_replica_check(mesh, SPECS)(put(mesh))


@pytest.mark.parametrize("sizes", [(8, 1, 1), (4, 2, 1), (4, 1, 2), (1, 8, 1)])
def test_a_replicated_weight(sizes):
    mesh = make_mesh(*sizes)
    check, tree = make_replica_check(mesh, SPECS), put(mesh)
    bad = mesh.devices.flat[5]
    tree["embed"]["w"] = flip_a_bit(tree["embed"]["w"], bad)
    with pytest.raises(CorruptionError) as caught:
        check(tree)
    assert f"embed.w: {bad} of process 0 against the majority" in str(caught.value)
    assert "1 of 4 weights" in str(caught.value)


@pytest.mark.parametrize("name", ["up", "down"])
def test_a_split_weight_is_compared_with_the_copies_of_the_same_part(name):
    mesh = make_mesh(4, 2, 1)
    check, tree = make_replica_check(mesh, SPECS), put(mesh)
    bad = mesh.devices[2, 1, 0]
    tree["mlp"][name] = flip_a_bit(tree["mlp"][name], bad)
    with pytest.raises(CorruptionError) as caught:
        check(tree)
    assert f"mlp.{name}: {bad} of process 0 against the majority" in str(caught.value)


def test_a_split_without_copies_has_nothing_to_compare():
    mesh = make_mesh(1, 8, 1)
    tree = put(mesh)
    tree["mlp"]["up"] = flip_a_bit(tree["mlp"]["up"], mesh.devices.flat[3])
    make_replica_check(mesh, SPECS)(tree)


def test_two_copies_have_no_majority():
    mesh = make_mesh(2, 1, 1)
    check, tree = make_replica_check(mesh, SPECS), put(mesh)
    tree["on"] = flip_a_bit(tree["on"], mesh.devices.flat[0])
    with pytest.raises(CorruptionError, match=r"on: .*, .* differ, and there is no majority"):
        check(tree)


def test_many_weights_and_devices_make_a_short_message():
    mesh = make_mesh(8, 1, 1)
    specs = {f"w{i}": P() for i in range(9)}
    tree = {name: jax.device_put(np.ones(3, np.float32), NamedSharding(mesh, P())) for name in specs}
    bad = {name: flip_a_bit(x, *mesh.devices.flat[:3]) for name, x in tree.items()}
    with pytest.raises(CorruptionError, match="9 of 9") as caught:
        make_replica_check(mesh, specs)(bad)
    assert "and 4 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 10


def test_one_compile_however_often():
    compiles: list[str] = []

    def listen(event: str, seconds: float, **about) -> None:
        if event.endswith("backend_compile_duration"):
            compiles.append(about["fun_name"])

    mesh = make_mesh(2, 2, 2)
    check, tree = make_replica_check(mesh, SPECS), put(mesh)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(3):
            check(tree)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiles) == 1


TWO_PROCESSES = """
import os, sys
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
import jax, numpy as np
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
from test_replicas import AXES, Mesh, NamedSharding, P, flip_a_bit, make_replica_check
mesh = Mesh(np.asarray(jax.devices()).reshape(4, 1, 1), AXES)
whole = NamedSharding(mesh, P())
tree = {"w": jax.make_array_from_callback((3,), whole, lambda _: np.ones(3, np.float32))}
check = make_replica_check(mesh, {"w": P()})
check(tree)
bad = mesh.devices.flat[3]
if bad.process_index == jax.process_index():
    tree = {"w": flip_a_bit(tree["w"], bad)}
try:
    check(tree)
except Exception as error:
    print(type(error).__name__, error)
jax.distributed.shutdown()
"""


def test_every_process_names_the_copy_of_the_other():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", TWO_PROCESSES, port]
    folder = Path(__file__).parent
    pipe = subprocess.PIPE
    running = [subprocess.Popen([*command, str(i)], stdout=pipe, stderr=pipe, text=True, cwd=folder) for i in range(2)]
    try:
        said = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    for out, err in said:
        assert "CorruptionError copies of 1 of 1 weights differ" in out, err
        assert "of process 1 against the majority" in out
