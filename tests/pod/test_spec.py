"""A slice in YAML."""

from pathlib import Path

import pytest
from specs import make_spec

from tinypod.config import load
from tinypod.errors import ConfigError
from tinypod.pod.spec import PodSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "pod.yaml"
DOCS = EXAMPLE.parents[1] / "docs" / "pods.md"


def test_the_example_loads() -> None:
    spec = load(EXAMPLE, [], PodSpec)
    assert (spec.slice.hosts, spec.accelerator_type, spec.runtime) == (8, "v4-64", "tpu-ubuntu2204-base")
    assert spec.is_queued
    assert spec.is_spot
    assert spec.hourly_dollars == pytest.approx(32 * 3.22 * 0.29)


def test_names_differ_between_google_and_jax() -> None:
    assert make_spec(type="v5litepod-16").accelerator_type == "v5litepod-16"
    assert make_spec(type="v5e-16").accelerator_type == "v5litepod-16"
    assert make_spec(type="v6e-8").runtime == "v2-alpha-tpuv6e"
    assert make_spec(type="v6e-8", runtime_version="my-image").runtime == "my-image"


def test_prices() -> None:
    assert make_spec(type="v6e-8").hourly_dollars == pytest.approx(8 * 2.70)
    assert make_spec(type="v6e-8", dollars_per_chip_hour=0.0).hourly_dollars == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zon": "x"}, "zon: unknown key; did you mean `zone"),
        ({"type": "v4-63"}, "type: v4-63: no such TPU slice"),
        ({"type": "tpu7x-16"}, "type: tpu7x-16 comes with GKE only: see `tinypod pod manifest --slice tpu7x-16`"),
        ({"request": {"kind": "reserved"}}, "request: no kind 'reserved'; expected one of"),
        ({"request": {"kind": "spot", "valid_hours": 1.0}}, "request.valid_hours: unknown key"),
        ({"disk": {"name": "d", "mode": "read-write"}}, "v4-16 has 2 hosts, which can only share it read-only"),
        ({"environment": {"WANDB_API_KEY": "x"}}, "environment: WANDB_API_KEY looks like a secret"),
        ({"environment": {"A B": "x"}}, "'A B' cannot be the name of a variable"),
        ({"spending_limit_dollars": -1.0}, "spending_limit_dollars: expected"),
    ],
)
def test_what_cannot_be_is_said(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_spec(**changes)
    assert message in str(caught.value)


def test_the_docs_name_every_key() -> None:
    text = DOCS.read_text()
    assert {name for name in PodSpec.model_fields if f"`{name}`" not in text} == set()
