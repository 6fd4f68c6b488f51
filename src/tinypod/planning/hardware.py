"""What plans are made for: a TPU slice, or GPUs."""

import difflib

from tinypod.errors import UserError
from tinypod.planning import gpus, slices
from tinypod.planning.gpus import Cards
from tinypod.planning.slices import Slice

Hardware = Slice | Cards


def find_hardware(name: str) -> Hardware:
    """By its name: v4-64, h100-8."""
    if (cards := gpus.find_cards(name)) is not None:
        return cards
    if slices.names_generation(name):
        return slices.find_slice(name)
    known = [one.name for one in find_all(None)]
    near = difflib.get_close_matches(name.strip().lower(), [*gpus.CARDS, *known], n=3)
    kinds = f"TPUs: {', '.join(slices.GENERATIONS)}; GPUs: {', '.join(gpus.CARDS)}"
    hint = f"did you mean {' or '.join(near)}?" if near else kinds
    raise UserError(f"{name}: no such TPU slice or GPU; {hint} (`tinypod slices` lists them all)")


def find_all(name: str | None) -> list[Hardware]:
    """All there is, all of one kind (v4, h100), or the one of that name."""
    if name is None:
        return [*slices.all_slices(), *gpus.all_cards()]
    if (card := gpus.find_card(name)) is not None:
        return [gpus.Cards(card, size) for size in gpus.sizes(card)]
    return [*slices.find_slices(name)] if slices.names_generation(name) else [find_hardware(name)]


def check_claims(
    target: Hardware, *, chips: int | None = None, hosts: int | None = None, devices: int | None = None
) -> None:
    """An error with the right numbers where one of these is wrong."""
    claims = {"chips": chips, "hosts": hosts, "devices": devices}
    wrong = [f"{value} {name}" for name, value in claims.items() if value not in (None, getattr(target, name))]
    if wrong:
        raise UserError(f"{target.name} does not have {' and '.join(wrong)}: {target.describe()}")
