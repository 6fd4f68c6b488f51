"""What ends a command early. Each kind of end has an exit code of its own, so that whoever started the command (a
person, the supervisor, a pod's scheduler) knows whether starting it again can help.

| code | meaning | starting again |
|---|---|---|
| 0 | done | |
| 2 | something asked for cannot work: config, data, checkpoint of another model | cannot help |
| 75 | storage failed: a full disk, an object store that refuses | helps once there is room |
| 76 | a deadline passed: a process hangs, is gone, or never came | helps |
| 77 | a function was compiled again after warm-up | cannot help |
| 78 | replicas of the weights differ: silent corruption of memory | helps, on other hardware |
| 79 | the loss stayed non-finite after every rollback | cannot help |
| 130, 143 | stopped by SIGINT, SIGTERM or a notice of preemption, with everything saved | goes on |
"""


class UserError(ValueError):
    """Says what was wrong (dotted key, path or line), what was expected, and what to do.

    The command line prints it as one message, without a traceback, and ends with its exit code.
    """

    exit_code = 2


class ConfigError(UserError):
    """A config key, value or override that cannot be used."""


class DataError(UserError):
    """A dataset, a row or a puzzle that cannot be used."""


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
    """A device that ran out of memory, at compiling or in a step."""

    exit_code = 80
