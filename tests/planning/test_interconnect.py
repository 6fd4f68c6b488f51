"""How long collectives take, by the links that they have."""

import math
from dataclasses import replace

import pytest

from tinypod.planning.calibration import calibration
from tinypod.planning.hlo.groups import BETWEEN_SLICES, Axes, Span
from tinypod.planning.hlo.program import Collective
from tinypod.planning.interconnect import seconds
from tinypod.planning.slices import find_slice

IDEAL = calibration().model_copy(update={"link_share": 1.0, "hop_s": 0.0})
MB = 10**6


def took(op: str, slice_name: str, span: Span, payload: int = 360 * MB, known=IDEAL) -> float:
    found = seconds(Collective(op, span, 1, payload, ()), find_slice(slice_name), known)
    assert found is not None
    return found


def box(*chips: int) -> Span:
    return Span(("data",), math.prod(chips), chips)


def test_all_axes_of_a_torus_work_at_once_each_in_both_directions() -> None:
    """A v4-128 is a torus of 4 × 4 × 4 with links of 45 GB/s; a v4-64 has 2 × 4 × 4 and ends."""
    share = 360e6 * 63 / 64
    assert took("all-gather", "v4-128", box(4, 4, 4)) == pytest.approx(share / (6 * 45e9))
    assert took("reduce-scatter", "v4-128", box(4, 4, 4)) == pytest.approx(share / (6 * 45e9))
    assert took("all-reduce", "v4-128", box(4, 4, 4)) == pytest.approx(2 * share / (6 * 45e9))
    assert took("all-gather", "v4-64", box(2, 4, 4)) == pytest.approx(360e6 * 31 / 32 / (3 * 45e9))


def test_a_part_of_an_axis_is_no_ring() -> None:
    assert took("all-gather", "v6e-256", box(16, 1, 1)) == pytest.approx(360e6 * 15 / 16 / (2 * 90e9))
    assert took("all-gather", "v6e-256", box(8, 1, 1)) == pytest.approx(360e6 * 7 / 8 / 90e9)
    assert took("all-gather", "v5e-8", box(2, 4, 1)) == pytest.approx(360e6 * 7 / 8 / (2 * 45e9))
    scattered = Span(("data",), 8)  # no box
    assert took("all-gather", "v6e-256", scattered) == pytest.approx(360e6 * 7 / 8 / 90e9)


def test_an_exchange_of_all_with_all_has_to_cross_the_middle() -> None:
    """Of a ring, half of what half of its chips have goes over two links each way."""
    assert took("all-to-all", "v6e-256", box(16, 1, 1)) == pytest.approx(360e6 * 16 / 8 / 90e9)
    assert took("all-to-all", "v6e-256", box(4, 1, 1)) == pytest.approx(360e6 * 4 / 4 / 90e9)


def test_a_permutation_takes_as_long_as_its_busiest_link() -> None:
    axes = Axes({"data": 4}, [(x, 0, 0) for x in range(4)])

    def shifted(by: int) -> Span:
        pairs = ",".join(f"{{{x},{(x + by) % 4}}}" for x in range(4))
        return axes.spanned("collective-permute", f"source_target_pairs={{{pairs}}}")

    assert shifted(1).ways[0] == ((1, 3), (1, 1))  # in a line the last goes all the way back, where nothing else goes
    assert shifted(1).ways[1:] == (((0, 0), (0, 0)),) * 2
    assert took("collective-permute", "v4-128", shifted(1)) == pytest.approx(360e6 / 45e9)
    assert took("collective-permute", "v4-128", shifted(2)) == pytest.approx(2 * 360e6 / 45e9)
    slow = IDEAL.model_copy(update={"hop_s": 1.0})
    assert took("collective-permute", "v4-32", shifted(1), 0, slow) == pytest.approx(3)
    assert took("collective-permute", "v4-128", shifted(1), 0, slow) == pytest.approx(1)


def test_a_permutation_goes_axis_by_axis() -> None:
    """Two chips of a row send to two of a column: both come around the same corner."""
    axes = Axes({"data": 9}, [(x, y, 0) for y in range(3) for x in range(3)])
    crossing = axes.spanned("collective-permute", "source_target_pairs={{0,5},{1,8}}")
    assert crossing.ways[:2] == (((2, 2), (1, 1)), ((2, 2), (1, 1)))


def test_groups_between_each_other_share_the_links() -> None:
    """4 x 4 chips, hosts of 2 x 2: `data` goes from host to host, so that two groups lie on every line of chips."""
    hosts = [(x, y) for y in (0, 2) for x in (0, 2)]
    axes = Axes({"data": 4, "fsdp": 4}, [(x + a, y + b, 0) for x, y in hosts for b in (0, 1) for a in (0, 1)])
    apart = axes.spanned("all-gather", "replica_groups={{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}")
    close = axes.spanned("all-gather", "replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}")
    assert (apart.chips, apart.strides) == ((2, 2, 1), (2, 2, 1))
    assert (close.chips, close.strides) == ((2, 2, 1), (1, 1, 1))
    assert took("all-gather", "v6e-16", close) == pytest.approx(360e6 * 3 / 4 / (2 * 90e9))
    assert took("all-gather", "v6e-16", apart) == pytest.approx(2 * 360e6 * 3 / 4 / (2 * 90e9))


def test_a_permutation_the_other_way_says_so() -> None:
    axes = Axes({"data": 4}, [(x, 0, 0) for x in range(4)])
    there, back = (
        axes.spanned("collective-permute", f"source_target_pairs={{{pairs}}}")
        for pairs in ("{0,1},{1,2},{2,3},{3,0}", "{1,0},{2,1},{3,2},{0,3}")
    )
    assert (there.backward, back.backward) == (False, True)
    assert axes.spanned("collective-permute", "source_target_pairs={{0,9}}").group_size > 1  # it is not nothing


def test_each_hop_takes_its_time() -> None:
    slow = IDEAL.model_copy(update={"hop_s": 1e-6})
    ring = took("all-gather", "v6e-256", box(16, 1, 1), 0, slow)
    assert ring == pytest.approx(8e-6)  # half way around, from both sides
    assert took("all-reduce", "v6e-256", box(16, 16, 1), 0, slow) == pytest.approx(2 * 16e-6)
    assert took("all-gather", "v6e-64", box(8, 8, 1), 0, slow) == pytest.approx(14e-6)


def test_between_slices_it_is_the_network_of_the_data_centre() -> None:
    """A sum of 640 MB over two v4-128, as the compiler writes it: each of 64 chips gets a 64th of its slice's sum over
    six links of 45 GB/s, exchanges these 10 MB with the other slice at 6.25 GB/s, and all gather the rest."""
    inside = 640e6 * 63 / 64 / (6 * 45e9)
    assert took("reduce-scatter", "v4-128", box(4, 4, 4), 640 * MB) == pytest.approx(inside)
    exchanged = took("all-reduce", "v4-128", Span(BETWEEN_SLICES, 2), 10 * MB)
    assert exchanged == pytest.approx(10e6 / 6.25e9)
    assert took("all-reduce", "v4-128", Span(BETWEEN_SLICES, 4), 10 * MB) == pytest.approx(1.5 * exchanged)
    assert took("all-gather", "v5e-16", Span(BETWEEN_SLICES, 2), 10 * MB) == pytest.approx(5e6 / 3.125e9)
    assert took("collective-permute", "v6e-16", Span(BETWEEN_SLICES, 2), 10 * MB) == pytest.approx(10e6 / 12.5e9)
    assert took("all-reduce", "tpu7x-8", Span(BETWEEN_SLICES, 2), 10 * MB) == pytest.approx(10e6 / 6.25e9)  # two a chip


def test_the_devices_of_a_chip_share_its_links() -> None:
    """tpu7x: a group of all eight has them alone; two groups with a device of each chip have half of them each."""
    whole = took("all-gather", "tpu7x-8", Span(("data",), 8, (2, 2, 1)))
    assert whole == pytest.approx(360e6 * 3 / 4 / (2 * 90e9))
    assert took("all-gather", "tpu7x-8", Span(("data",), 4, (2, 2, 1))) == pytest.approx(2 * whole)


def test_one_device_sends_nothing_and_an_unknown_link_is_no_number() -> None:
    assert took("all-reduce", "v4-8", Span((), 1)) == 0
    known = find_slice("v4-8")
    dark = replace(known, generation=replace(known.generation, ici_link=None))
    assert seconds(Collective("all-reduce", box(2, 2, 1), 1, MB, ()), dark, IDEAL) is None


def test_where_the_groups_of_a_mesh_are() -> None:
    """A mesh of 4 × 2 over a plane of 2 × 4 chips, as its hosts count them."""
    places = [(x, y, 0) for y in range(4) for x in range(2)]
    axes = Axes({"data": 4, "fsdp": 2}, places)
    groups = {"data": "{{0,2,4,6},{1,3,5,7}}", "fsdp": "{{0,1},{2,3},{4,5},{6,7}}", "all": "{{0,1,2,3,4,5,6,7}}"}
    found = {name: axes.spanned("all-reduce", f"replica_groups={text}") for name, text in groups.items()}
    assert found["data"] == Span(("data",), 4, (1, 4, 1), (1, 1, 1))
    assert found["fsdp"] == Span(("fsdp",), 2, (2, 1, 1), (1, 1, 1))
    assert found["all"] == Span(("data", "fsdp"), 8, (2, 4, 1), (1, 1, 1))
    assert axes.spanned("all-reduce", "replica_groups={{0,3},{1,2},{4,7},{5,6}}").chips == ()  # diagonals
