"""The table of slices, held against what the TPU compiler says of each; and what is believed wrongly, put right."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import tpu
from tinypod import cli
from tinypod.errors import UserError
from tinypod.planning import slices
from tinypod.planning.hardware import check_claims

ASK_THE_COMPILER = """
import json, re, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
answers = {}
for name, arguments in json.load(sys.stdin).items():
    devices = topologies.get_topology_desc(**arguments).devices
    answers[name] = {"devices": len(devices), "hosts": len({d.process_index for d in devices})}
    if name.endswith(("-8", "-4")):
        huge = jax.ShapeDtypeStruct((2**38,), jnp.bfloat16, sharding=SingleDeviceSharding(devices[0]))
        try:
            jax.jit(lambda x: x + 1).lower(huge).compile()
        except jax.errors.JaxRuntimeError as error:
            answers[name]["gib"] = float(re.search(r"exceeds available HBM \\(([\\d.]+)G", str(error))[1])
print("ANSWERS" + json.dumps(answers))
"""


@tpu.needs_compiler
def test_the_table_is_what_the_compiler_says() -> None:
    asked = {known.name: known.topology_arguments() for known in slices.all_slices()}
    answers = json.loads(tpu.run(ASK_THE_COMPILER, json.dumps(asked)).split("ANSWERS")[1])
    assert len(answers) == len(slices.all_slices()) > 40
    for known in slices.all_slices():
        answer = answers[known.name]
        assert (answer["devices"], answer["hosts"]) == (known.devices, known.hosts), known.name
        if "gib" in answer:
            generation = known.generation
            has = generation.hbm_bytes / generation.devices_per_chip / slices.GIB
            usable = min(answer["gib"], has)  # the compiler allows more of a v5p than it has
            assert usable == pytest.approx(generation.usable_bytes / slices.GIB, abs=0.006), known.name
    assert {name.split("-")[0] for name, answer in answers.items() if "gib" in answer} == set(slices.GENERATIONS)


@pytest.mark.parametrize("generation", slices.GENERATIONS.values(), ids=lambda generation: generation.name)
def test_no_device_has_more_usable_memory_than_is_sold(generation: slices.Generation) -> None:
    assert 0.9 < generation.usable_bytes * generation.devices_per_chip / generation.hbm_bytes <= 1


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "devices"),
    [
        ("v4-32", 16, 4, 16),
        ("v4-64", 32, 8, 32),
        ("v5p-16", 8, 2, 8),
        ("v5p-128", 64, 16, 64),
        ("v5litepod-8", 8, 1, 8),
        ("v5e-16", 16, 4, 16),
        ("v6e-1", 1, 1, 1),
        ("tpu7x-8", 4, 1, 8),
    ],
)
def test_what_documents_get_wrong(name: str, chips: int, hosts: int, devices: int) -> None:
    found = slices.find_slice(name)
    assert (found.chips, found.hosts, found.devices) == (chips, hosts, devices)


def test_several_slices_have_more_of_everything_but_links() -> None:
    one = slices.find_slice("v5e-16")
    two = one.times(2)
    assert (two.name, two.chips, two.hosts, two.devices) == ("2 × v5e-16", 32, 8, 32)
    assert two.peak_bf16 == 2 * one.peak_bf16
    assert two.topology_arguments() == one.topology_arguments() | {"num_slices": 2}
    assert two.dcn_bandwidth == one.dcn_bandwidth == 25e9 / 8  # 25 Gbit/s a chip
    assert one.times(1) == one


def test_no_device_has_more_memory_than_its_chip_is_sold_with() -> None:
    for known in slices.GENERATIONS.values():
        assert known.usable_bytes * known.devices_per_chip <= known.hbm_bytes, known.name


def test_numbers_without_a_slice_are_refused() -> None:
    for arguments in (["--hosts", "8"], ["v4", "--hosts", "8"]):
        with pytest.raises(UserError, match="--hosts: say of which slice"):
            raise CliRunner().invoke(cli.app, ["slices", *arguments]).exception


def test_a_wrong_belief_is_corrected() -> None:
    check_claims(slices.find_slice("v4-32"), hosts=4, chips=16)
    with pytest.raises(
        UserError, match=r"v4-32 does not have 32 chips and 8 hosts: the 32 .* counts TensorCores; it has"
    ):
        check_claims(slices.find_slice("v4-32"), chips=32, hosts=8)
    result = CliRunner().invoke(cli.app, ["slices", "v4-32", "--hosts", "8"])
    assert isinstance(result.exception, UserError)
    assert "16 chips on 4 hosts" in str(result.exception)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v4-33", "v4 comes as v4-8, v4-16, v4-32"),
        ("v4", "no such TPU slice"),
        ("v9-8", "did you mean"),
        ("b300", "generations: v4, v5e"),
        ("v6e-2", "v6e comes as v6e-1, v6e-4"),
    ],
)
def test_a_slice_that_does_not_exist(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        slices.find_slice(name)


def test_the_command_lists_them_all() -> None:
    listed = CliRunner().invoke(cli.app, ["slices"], env={"COLUMNS": "160"})
    assert listed.exit_code == 0
    assert all(known.name in listed.stdout for known in slices.all_slices())
    as_json = json.loads(CliRunner().invoke(cli.app, ["slices", "v4-64", "--json"]).stdout)
    assert as_json[0] | {"chips": 32, "hosts": 8, "devices": 32, "topology": "2x4x4"} == as_json[0]


def test_a_terminal_that_knows_ascii_only_gets_an_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tinypod", "slices", "v4-64"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "6 ? 45" in done.stdout


def test_slices_are_found_by_their_generation() -> None:
    assert {one.generation.name for one in slices.find_slices("v4")} == {"v4"}
    assert slices.find_slices("V4")[0].name == "v4-8"
    assert slices.find_slices("v5litepod") == slices.find_slices("v5e")
    assert slices.find_slices("v4-64") == [slices.find_slice("v4-64")]
    assert slices.find_slices(None) == slices.all_slices()
    with pytest.raises(UserError, match=r"v9: no such TPU slice.*generations: v4, v5e"):
        slices.find_slices("v9")
