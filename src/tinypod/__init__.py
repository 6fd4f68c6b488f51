"""tinypod trains tiny recursive reasoning models with one command on a laptop, a GPU or a TPU pod.

The functions for Python and notebooks are those of `api.py`, imported when first used: `import tinypod` alone, and the
commands' `--help`, import no JAX.
"""

from typing import TYPE_CHECKING

from tinypod.errors import UserError

if TYPE_CHECKING:
    from tinypod.api import Model, load, make_sudoku, plan, train

__version__ = "0.1.0"
__all__ = ["Model", "UserError", "__version__", "load", "make_sudoku", "plan", "train"]

if not TYPE_CHECKING:  # a type checker would take it to mean that every name exists

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'tinypod' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
        from tinypod import api

        return getattr(api, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
