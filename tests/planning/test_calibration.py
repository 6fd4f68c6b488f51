"""The numbers that predictions are made with, against what they were fitted to."""

from pathlib import Path

import pytest

from tinypod.planning.calibration import calibration
from tinypod.planning.hlo.program import read
from tinypod.planning.planner import predict_for
from tinypod.planning.slices import find_slice


def test_an_expectation_lies_between_roofline_and_estimate() -> None:
    known = calibration()
    for kind, weight in known.toward_cycles.items():
        assert known.expected_s(kind, 1.0, 4.0) == pytest.approx(4.0**weight)
        assert known.expected_s(kind, 4.0, 1.0) == 4.0
        assert known.expected_s(kind, 4.0, None) == 4.0
        assert known.expected_s(kind, 0.0, 2.0) == 2.0  # a kernel that neither multiplies nor moves


@pytest.mark.parametrize(
    ("file", "name", "rel"),
    [
        ("copy", "v6e-1", 0.02),
        ("product", "v6e-1", 0.08),  # fitted to another estimate of the compiler's; calibration.yaml says why it stayed
        ("psum", "v6e-256", 0.02),
    ],
)
def test_the_fit_fits(file: str, name: str, rel: float) -> None:
    """The programs as the compiler wrote them."""
    target, known = find_slice(name), calibration()
    x, y, _ = target.topology
    text = (Path(__file__).with_name("hlo") / f"v6e_{file}.txt").read_text()
    mesh = {"data": target.devices, "pipeline": 1, "fsdp": 1, "tensor": 1}
    program = read(text, mesh, [(at % x, at // x, 0) for at in range(x * y)])
    measured = dict(zip(("copy", "product", "psum"), (one.measured_ms for one in known.sources), strict=True))
    made = predict_for(program, target)
    assert 1e3 * made.step_s == pytest.approx(measured[file], rel=rel)
    assert made.least_s <= made.step_s <= made.most_s
