"""What ends a command early. Each kind of end has an exit code of its own, so that whoever started the command (a
person, the supervisor, a pod's scheduler) knows whether starting it again can help.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pydantic import ValidationError


def first_message(error: "ValidationError") -> str:
    """Where in a file, and what, the first of its faults is."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}"


class UserError(ValueError):
    """Says what was wrong (dotted key, path or line), what was expected, and what to do.

    The command line prints it as one message, without a traceback, and ends with its exit code.
    """

    exit_code = 2


class ConfigError(UserError):
    """A config key, value or override that cannot be used."""


class DataError(UserError):
    """A dataset, a row or a puzzle that cannot be used."""


class DeviceError(UserError):
    """A platform or a plugin that is not there."""


class CheckpointError(UserError):
    """A checkpoint that cannot be restored: another model, another state, or damaged."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not what was written."""


class StorageError(UserError):
    """A disk or an object store that does not take or give what it should."""

    exit_code = 75


class DeadlineError(UserError):
    """A wait that took longer than its deadline; names who is missing and what they were doing."""

    exit_code = 76


class RecompileError(UserError):
    """A function compiled again after warm-up; names it and what changed."""

    exit_code = 77


class CorruptionError(UserError):
    """Replicas that should be equal and are not; names the arrays and the devices."""

    exit_code = 78


class NonFiniteError(UserError):
    """A loss that stays non-finite, whatever was skipped."""

    exit_code = 79


class DeviceMemoryError(UserError):
    """A device that ran out of memory, in compiling or in the step."""

    exit_code = 80


@dataclass(frozen=True)
class ExitCode:
    """What a command's end means, and whether the supervisor starts it again (later: with patience)."""

    meaning: str
    restart: Literal["never", "always", "later"]


EXIT_CODES: dict[int, ExitCode] = {  # docs/reliability.md has the same table
    0: ExitCode("done", "never"),
    1: ExitCode("an unexpected error, or a check that failed", "always"),
    2: ExitCode("something asked for cannot work: config, data, device, checkpoint of another model", "never"),
    75: ExitCode("storage failed: a full disk, an object store that refuses", "later"),
    76: ExitCode("a deadline passed: a process hangs, is gone, or never came", "always"),
    77: ExitCode("a function was compiled again after warm-up", "never"),
    78: ExitCode("replicas of the weights differ: silent corruption of memory", "always"),
    79: ExitCode("the loss stayed non-finite after every rollback", "never"),
    80: ExitCode("a device has too little memory, in compiling or in the step; also of `tinypod plan`", "never"),
    130: ExitCode("stopped by Ctrl-C (SIGINT), with everything saved unless it came twice", "never"),
    143: ExitCode("stopped by SIGTERM or a notice of preemption, with everything saved", "always"),
}
FINAL = frozenset(code for code, end in EXIT_CODES.items() if end.restart == "never")
LATER = frozenset(code for code, end in EXIT_CODES.items() if end.restart == "later")
FINISHED = frozenset(code for code in EXIT_CODES if code == 0 or code > 128)  # took nothing away from other processes
EXPLAINED = frozenset(code for code in EXIT_CODES if 1 < code < 128)  # the process has said what was wrong
