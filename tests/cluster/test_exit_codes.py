"""One table of exit codes, in `errors`: the classes and the documentation agree with it."""

import re
from pathlib import Path

from tinypod import errors

DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_the_documentation_has_the_same_table() -> None:
    section = DOCS.read_text().split("## Exit codes\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (\w+) \|$", section, re.MULTILINE)
    assert {int(code): errors.ExitCode(meaning, restart) for code, meaning, restart in rows} == errors.EXIT_CODES


def test_every_error_has_a_code_in_the_table() -> None:
    kinds, left = set(), [errors.UserError]
    while left:
        kinds.add(kind := left.pop())
        left += kind.__subclasses__()
    assert {kind.exit_code for kind in kinds} == errors.EXPLAINED


def test_what_is_derived_from_the_table() -> None:
    assert {0, 2, 77, 79, 80, 130} == errors.FINAL
    assert {errors.StorageError.exit_code} == errors.LATER
    assert {0, 130, 143} == errors.FINISHED
    assert errors.DeviceError.exit_code == 2
