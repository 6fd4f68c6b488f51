"""Plans against what others measured: the rows of `benchmarks/published.py`, and one of their programs read again."""

import gzip
import sys
from collections import Counter
from pathlib import Path

import pytest

from tinypod import config as configs
from tinypod.planning.hlo.program import Program, read
from tinypod.planning.planner import predict_for
from tinypod.planning.slices import find_slice

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import published  # noqa: E402

ROWS = configs.load(published.ROWS, [], published.File)
LLAMA = "v6e-8, llama3.1-8b, 3 x 8192 tokens a chip"
PLACES = [(x, y, 0) for y in range(4) for x in range(2)]


@pytest.fixture(scope="module")
def llama() -> Program:
    """That row's program as the TPU compiler wrote it, without what names places in the source."""
    with gzip.open(Path(__file__).with_name("hlo") / "v6e_llama_8b.txt.gz", "rt") as file:
        return read(file.read(), {"data": 1, "pipeline": 1, "fsdp": 8, "tensor": 1}, PLACES)


def test_every_row_is_predicted_within_a_quarter() -> None:
    kept = published.read_kept()
    timed = [(row, row.published_s()) for row in ROWS.kernels]
    timed += [(row, row.published_s(ROWS.models[row.model])) for row in ROWS.training]
    assert set(kept) == {row.name for row, _ in timed}
    ratios = {row.name: kept[row.name].s / seconds for row, seconds in timed if seconds is not None}
    assert len(ratios) == len(timed)
    assert {name: ratio for name, ratio in ratios.items() if not 0.75 < ratio < 1.25} == {}
    assert sum(not row.fitted and not row.seen for row, _ in timed) >= 10


def test_what_is_kept_is_what_the_planner_says(llama: Program) -> None:
    found = published.kept(predict_for(llama, find_slice("v6e-8")), compiler="")
    kept = published.read_kept()[LLAMA]
    assert (found["s"], found["least_s"], found["most_s"]) == pytest.approx((kept.s, kept.least_s, kept.most_s), 1e-3)
    assert found["hidden_s"] == pytest.approx(kept.hidden_s, 1e-3)


def test_splash_attention_by_its_blocks(llama: Program) -> None:
    """3 rows, 32 heads of 128; 16 blocks of 512 positions, each with itself and those before it."""
    product = 2 * 3 * 32 * 128 * 512**2 * (16 * 17 / 2)
    flops = {kernel.name: kernel.flops for kernel in llama.kernels if kernel.name.startswith("splash")}
    assert sorted(flops.values()) == [2 * product, 2 * product, 5 * product]  # forward, again, backward
    assert llama.opaque_calls == ()


def test_collectives_on_sparse_cores_are_hidden_by_the_kernels_between(llama: Program) -> None:
    """A layer's weights are gathered twice, and their gradients scattered, while other layers' kernels run."""
    layer = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) * 2  # bytes of all, in bfloat16
    sent: Counter[str] = Counter()
    for one in llama.collectives:
        if one.runs == 32 and one.during is not None and one.shapes != ("bf16[4096,128256]",):  # of the head, by parts
            sent[one.op] += one.runs * one.payload_bytes
            assert one.axes == ("fsdp",)
            assert one.during[1] > one.during[0], one
    assert sent["all-gather"] == pytest.approx(2 * layer, 0.01)
    assert sent["reduce-scatter"] == pytest.approx(layer, 0.01)


def test_a_figure_has_one_unit() -> None:
    with pytest.raises(ValueError, match="one unit"):
        published.Figure(s=1.0, ms=1.0)
    with pytest.raises(ValueError, match="one unit"):
        published.Figure()


def test_the_flops_that_maxtext_counts() -> None:
    """Llama-3.1-8B, by hand: 8.03 billion weights less the embedding's, and attention over all pairs."""
    row = next(row for row in ROWS.training if row.name == LLAMA)
    weights = 8.03e9 - 128256 * 4096
    attention = 32 * 2 * 8192 * 4096
    assert row.flops(ROWS.models[row.model]) == pytest.approx(6 * 3 * 8192 * (weights + attention), 1e-3)
