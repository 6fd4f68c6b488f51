"""A compile after warm-up costs minutes on a pod, and repeats: it is found, named and, by default, ends the run.

JAX's monitoring says that something was compiled, and costs nothing while nothing is.
"""

import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import jax

from tinypod.errors import RecompileError

_COMPILED = "/jax/core/compile/backend_compile_duration"
_MAY_COMPILE = ("starting", "compiling", "restoring", "closing")  # whatever was declared warm
_INSIDE = (f"{Path(jax.__file__).parent}{os.sep}", __file__, "<")  # files that did not ask for the compile


class CompileGuard:
    """Reports what the thread that entered it compiles after `warm`. `phase` says what the process is doing; `warn` is
    called where `on_recompile` is "warn"."""

    def __init__(
        self,
        phase: Callable[[], str],
        on_recompile: Literal["stop", "warn"] = "stop",
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._phase, self._on_recompile, self._warn = phase, on_recompile, warn
        self._warm = False
        self._found: list[str] = []
        self._thread = 0

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def warm(self) -> None:
        """Everything is compiled: from now on nothing should be."""
        self._warm = True

    def check(self) -> None:
        """Raise, or warn of, what was compiled since the last check."""
        found, self._found = self._found, []
        if self._on_recompile == "warn":
            for text in found:
                self._warn(text)
        if not found or self._on_recompile == "warn":
            return
        more = f"\n(and {len(found) - 1} more)" if len(found) > 1 else ""
        raise RecompileError(
            f"{found[0]}{more}\nCall it with the same types and static values each time, and compile it before the "
            "loop; or continue all the same with health.on_recompile=warn"
        )

    def _on_event(self, event: str, duration_secs: float, **about: Any) -> None:
        if event != _COMPILED or not self._warm or threading.get_ident() != self._thread:
            return
        phase = self._phase()
        if phase not in _MAY_COMPILE:
            name = about.get("fun_name", "a function")
            self._found.append(
                f"{name} was compiled after warm-up, while {phase} ({duration_secs:.1f} s), called at {_caller()}"
            )


def _caller() -> str:
    """The innermost line outside JAX."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_INSIDE):
            return f"{frame.filename}:{frame.lineno} ({frame.name})"
    return "an unknown line"
