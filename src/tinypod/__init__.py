"""tinypod trains tiny recursive reasoning models with one command on a laptop, a GPU or a TPU pod."""

__version__ = "0.1.0"
