"""The text, parsed: a module of computations of instructions, in the order of the schedule.

Attributes stay text, and are searched when asked for: of most instructions nobody asks.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

UNKNOWN_CYCLES = 2**63 - 1  # what the TPU compiler writes for "no estimate"
HOST_MEMORY = 5
_SPARSE = 'async_execution_thread="sparsecore"'


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


COLLECTIVES = words(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast"
)


@dataclass(frozen=True)
class Array:
    dtype: str
    dims: tuple[int, ...]
    space: int

    @cached_property
    def size(self) -> int:
        return math.prod(self.dims)

    @cached_property
    def item_bytes(self) -> float:
        return 1 if self.dtype == "pred" else int(find(r"^[a-z]+(\d+)", self.dtype) or 0) / 8  # a token has none

    @cached_property
    def bytes(self) -> int:
        return math.ceil(self.size * self.item_bytes)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(slots=True)
class Instruction:
    name: str
    opcode: str
    shape: str
    arguments: str  # the text between the parentheses
    operands: tuple[str, ...]
    attributes: str

    @property
    def kind(self) -> str:
        """The opcode; of an asynchronous one, what its -start starts."""
        return self.opcode.removesuffix("-start")

    @property
    def arrays(self) -> tuple[Array, ...]:
        return _arrays(self.shape)

    @property
    def size(self) -> int:
        return sum(array.size for array in self.arrays)

    @property
    def results(self) -> tuple[Array, ...]:
        """The arrays it makes, or sends: a -start also returns its operands and what the -done will need."""
        if self.opcode == "copy-start":
            return self.arrays[:1]
        if self.opcode in ("send", "recv"):
            return _arrays(_parts(self.shape)[0])
        # The tuple of an all-reduce is that of its results, except where GPUs put one of the operands first.
        with_operands = self.shape.startswith("((" if self.opcode == "all-reduce-start" else "(")
        if self.opcode.endswith("-start") and with_operands:
            parts = _parts(self.shape)
            return _arrays(parts[1]) if len(parts) > 1 else self.arrays
        return self.arrays

    @property
    def target(self) -> str:
        return find(r'custom_call_target="([^"]*)"', self.attributes)

    @property
    def crosses_slices(self) -> bool:
        """The TPU compiler writes one slice's program, and has the hosts exchange what goes to the others."""
        return self.opcode in ("send", "recv") and '"xla_megascale_runtime"' in self.attributes

    @property
    def cycles(self) -> int | None:
        cycles = int(find(r'"estimated_cycles":"?(\d+)', self.attributes) or UNKNOWN_CYCLES)
        return None if cycles >= UNKNOWN_CYCLES else cycles


@dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""
    parameters: dict[int, str] = field(default_factory=dict)

    @cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Who uses a value, and as which operand."""
        users = defaultdict(list)
        for instruction in self.instructions.values():
            for position, operand in enumerate(instruction.operands):
                users[operand].append((instruction, position))
        return users

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands]


@dataclass
class Module:
    header: str
    tpu: bool
    computations: dict[str, Computation]
    entry: Computation

    @property
    def aliased(self) -> frozenset[int]:
        # `input_output_alias={ {0}: (0, {}, may-alias), … }`: only there does an index precede a number in parentheses.
        listed = find(r"input_output_alias=\{(.*?\)) \}", self.header)
        return frozenset(map(int, re.findall(r"\{\d*\}: \((\d+),", listed)))

    def called(self, instruction: Instruction, *attributes: str) -> Computation:
        """The computation that the first of these attributes names: of a fusion or call, `calls` or `to_apply`."""
        wanted = attributes or ("calls", "to_apply")
        names = (find(rf"\b{attribute}=%([\w.\-]+)", instruction.attributes) for attribute in wanted)
        return self.computations[next(filter(None, names), "")]

    def beside(self, instruction: Instruction) -> Computation | None:
        """The computation that an instruction starts on a TPU's sparse cores, if it does."""
        if not (instruction.opcode.endswith("-start") and _SPARSE in instruction.attributes):
            return None
        name = find(r"\b(?:to_apply=|called_computations=\{)%([\w.\-]+)", instruction.attributes)
        return self.computations.get(name)

    def branches(self, conditional: Instruction) -> list[Computation]:
        names = _OPERAND.findall(find(r"branch_computations=\{([^}]*)\}", conditional.attributes))
        if names:
            return [self.computations[name] for name in names]
        return [self.called(conditional, f"{truth}_computation") for truth in ("true", "false")]

    def hbm(self, array: Array) -> bool:
        """Whether an array lies there. On a TPU every memory space but the first is the chip's own or the host's."""
        return array.space == 0 if self.tpu else array.space != HOST_MEMORY

    def hbm_bytes(self, arrays: Iterable[Array]) -> float:
        return sum(array.bytes for array in arrays if self.hbm(array))


_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"  (ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")


def parse(text: str) -> Module:
    computations: dict[str, Computation] = {}
    current, entry = None, None
    for line in text.splitlines():
        if line == "}" or line.startswith("}, execution_thread="):
            current = None
        elif current is not None and _INSTRUCTION.match(line):
            _add_instruction(current, line)
        elif current is not None and current.instructions:
            # A Pallas kernel's metadata have lines of their own.
            next(reversed(current.instructions.values())).attributes += line
        elif heading := _COMPUTATION.match(line):
            current = computations[heading[2]] = Computation(heading[2])
            entry = current if heading[1] else entry
    if entry is None:
        raise ValueError("not the text of a compiled program: it has no ENTRY computation")
    # Only layouts of a TPU have tiles.
    return Module(text.partition("\n")[0], ":T(" in text, computations, entry)


def _add_instruction(computation: Computation, line: str) -> None:
    found = _INSTRUCTION.match(line)
    assert found
    root, name, shape, opcode = found.groups()
    end = _closing(line, found.end())
    arguments = line[found.end() : end]
    operands = () if opcode in ("constant", "parameter") else tuple(_OPERAND.findall(arguments))
    computation.instructions[name] = Instruction(name, opcode, shape, arguments, operands, line[end + 1 :])
    if opcode == "parameter":
        computation.parameters[int(arguments)] = name
    if root:
        computation.root = name


def _closing(text: str, start: int) -> int:
    """Where the parenthesis closes that opened just before `start`."""
    end = text.find(")", start)
    while end >= 0 and text.count("(", start, end) > text.count(")", start, end):
        end = text.find(")", end + 1)
    return end if end >= 0 else len(text)


@lru_cache(maxsize=2**16)
def _arrays(shape: str) -> tuple[Array, ...]:
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        space = find(r"S\((\d+)\)", layout)
        sizes = tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d.strip() not in ("", "?"))
        found.append(Array(dtype, sizes, int(space or 0)))
    return tuple(found)


@lru_cache(maxsize=2**12)
def _parts(shape: str) -> tuple[str, ...]:
    """The members of a tuple's shape, tuples whole."""
    parts, depth, start = [], 0, 1
    for at, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            parts.append(shape[start:at])
            start = at + 1
    return tuple(parts)


def find(pattern: str, text: str) -> str:
    """The first group of the first match, or nothing."""
    found = re.search(pattern, text)
    return found[1] if found else ""


def ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text)]
