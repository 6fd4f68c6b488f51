"""What a user did that cannot work. The command line prints these as one message, without a traceback."""


class UserError(ValueError):
    """Says what was wrong (dotted key, path or line), what was expected, and what to do."""


class ConfigError(UserError):
    """A config key, value or override that cannot be used."""


class DataError(UserError):
    """A dataset, a row or a puzzle that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that cannot be restored: another model, another state, or damaged."""
