"""A compile after warm-up costs minutes on a pod, and repeats: it is found, explained and, by default, ends the run.

JAX's monitoring (public) says that something was compiled, and costs nothing while nothing is. What was called comes
from the frames on the stack at that moment: JAX's own explanations (`jax_explain_cache_misses`) must be switched on,
are printed, name arguments by position and say nothing about static values since 0.11. The names of those frames are
JAX's, so a version that renames them makes reports shorter, not wrong.
"""

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

import jax
import numpy as np

from tinypod.errors import RecompileError

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_CALL_FRAMES = ("cache_miss", "jit_lower")  # of `f(...)` and of `f.lower(...)`
_KEPT = 8  # calls of one function to compare with
_SHOWN = 6  # differences, and argument types
_JAX_FOLDER = str(Path(jax.__file__).parent)


@dataclass(frozen=True)
class Call:
    """What a function was compiled for."""

    types: dict[str, str] = field(default_factory=dict)  # of each array: `state.params.w` -> `float32[16,8]`
    shardings: dict[str, str] = field(default_factory=dict)
    statics: dict[str, str] = field(default_factory=dict)
    function: Callable[[], Any] = lambda: None  # a weak reference
    code: Any = None  # shared by all functions that one `def` makes
    called: str = ""  # file:line (function)


class CompileGuard:
    """Reports what the thread that entered it compiles in a phase that was declared warm.

    `phase` says which phase the process is in; `warn` is told where `on_recompile` is "warn". Compiles are expected
    until `warm` was called for their phase: after the first log, the first evaluation, the first save.
    """

    def __init__(
        self,
        phase: Callable[[], str],
        on_recompile: Literal["stop", "warn"] = "stop",
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._phase, self._on_recompile, self._warn = phase, on_recompile, warn
        self._warm: set[str] = set()
        self._calls: dict[str, list[Call]] = {}
        self._lowered: dict[str, Call] = {}
        self._found: list[str] = []
        self._thread = 0

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def warm(self, kind: str) -> None:
        """From now on, nothing should compile in this kind of phase."""
        self._warm.add(kind)

    def check(self) -> None:
        """Raise, or warn of, what was compiled since the last check."""
        if not self._found:
            return
        found, self._found = self._found, []
        if self._on_recompile == "warn":
            for text in found:
                self._warn(text)
            return
        more = f"\n(and {len(found) - 1} more)" if len(found) > 1 else ""
        raise RecompileError(
            f"{found[0]}{more}\nCall it with the same types and static values each time, before the loop if it is new; "
            "or go on all the same with health.on_recompile=warn"
        )

    def _on_event(self, event: str, duration_secs: float, **about: Any) -> None:
        if event not in (_LOWERED, _COMPILED) or threading.get_ident() != self._thread:
            return
        name = str(about.get("fun_name", "a function"))
        call = _call_on_stack()
        if event == _LOWERED:  # the stack of a later `.compile()` has no arguments
            self._lowered[name] = call
            return
        lowered = self._lowered.pop(name, None)
        if not call.types and not call.statics and lowered is not None:
            call = lowered
        earlier = self._calls.setdefault(name, [])
        phase = self._phase()
        if phase in self._warm:
            self._found.append(_explain(name, call, earlier, phase, duration_secs))
        earlier.append(call)
        del earlier[:-_KEPT]


def _explain(name: str, call: Call, earlier: list[Call], phase: str, seconds: float) -> str:
    called = f", called at {call.called}" if call.called else ""
    lines = [f"{name} was compiled after warm-up, while {phase} ({seconds:.1f} s{called})"]
    if call.types:
        lines.append(f"  its arguments: {_listed(call.types)}")
    if call.statics:
        lines.append(f"  static: {_listed(call.statics)}")
    return "\n".join([*lines, *(f"  {text}" for text in _reasons(call, earlier))])


def _reasons(call: Call, earlier: list[Call]) -> list[str]:
    """What differs from the earlier call that it is most like."""
    if not earlier:
        return ["it had not been compiled before"]
    differences = min((_differences(old, call) for old in reversed(earlier)), key=len)
    if differences:
        more = [f"and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
        return ["changed: " + text for text in differences[:_SHOWN]] + more
    if call.function() is not None and all(old.function() is not call.function() for old in earlier):
        where = f" at {call.code.co_filename}:{call.code.co_firstlineno}" if call.code is not None else ""
        if call.code is not None and any(old.code is call.code for old in earlier):
            return [f"the function is defined anew{where} for each call, with the same arguments; define it once"]
        return [f"another function of that name{where} had not been compiled before"]
    return ["its arguments are as before: a JAX setting or mesh around the call changed"]


def _differences(old: Call, new: Call) -> list[str]:
    texts = []
    for name in dict.fromkeys([*old.types, *new.types]):
        before, now = old.types.get(name, "absent"), new.types.get(name, "absent")
        if before != now:
            texts.append(f"{name}: {before} -> {now}")
        elif old.shardings.get(name) != new.shardings.get(name):
            texts.append(f"{name}: {now} on {old.shardings.get(name)} -> on {new.shardings.get(name)}")
    for name in dict.fromkeys([*old.statics, *new.statics]):
        before, now = old.statics.get(name, "its default"), new.statics.get(name, "its default")
        if before != now:
            texts.append(f"static {name}: {before} -> {now}")
    return texts


def _listed(values: dict[str, str]) -> str:
    shown = [f"{name}: {value}" for name, value in list(values.items())[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else "")


def _call_on_stack() -> Call:
    """The innermost call of a compiled function, and the line outside JAX that made it."""
    for frame in _frames():
        if frame.f_code.co_name in _CALL_FRAMES and frame.f_code.co_filename.startswith(_JAX_FOLDER):
            with contextlib.suppress(Exception):  # a JAX that keeps other things in its frames
                return _describe(frame)
    return Call(called=_caller(next(_frames())))


def _frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    frame = frame or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe(frame: FrameType) -> Call:
    local = frame.f_locals
    function = local["jit_func"]._fun if "jit_func" in local else local["fun"]
    info = local["jit_func"]._jit_info if "jit_func" in local else local["jit_info"]
    args, kwargs = local["args"], local["kwargs"]
    static = {f"argument {i % len(args)}" for i in info.static_argnums if -len(args) <= i < len(args)}
    static |= set(info.static_argnames)
    types, shardings, statics = {}, {}, {}
    named = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
    names = _parameter_names(info.fun_signature, len(args))
    for name, value in named.items():
        shown = names.get(name, name)
        if name in static:
            statics[shown] = repr(value)[:120]
            continue
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            key = shown + (f".{jax.tree_util.keystr(path, simple=True, separator='.')}" if path else "")
            types[key] = _type(leaf)
            if isinstance(leaf, jax.Array) and leaf.committed:
                shardings[key] = str(getattr(leaf.sharding, "spec", leaf.sharding))
    return Call(
        types=types,
        shardings=shardings,
        statics=statics,
        function=_weak(function),
        code=getattr(function, "__code__", None),
        called=_caller(frame),
    )


def _parameter_names(signature: Any, count: int) -> dict[str, str]:
    """Positional arguments by the name they have in the function."""
    if signature is None:
        return {}
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {f"argument {i}": p.name for i, p in enumerate(positional[:count])}


def _type(leaf: Any) -> str:
    kind = jax.typeof(leaf)
    weak = " (weak type)" if getattr(kind, "weak_type", False) else ""
    shape = ",".join(map(str, np.shape(leaf)))
    return f"{kind.dtype}[{shape}]{weak}"


def _weak(function: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(function)
    except TypeError:
        return lambda: None


def _caller(frame: FrameType) -> str:
    for outer in _frames(frame):
        file = outer.f_code.co_filename
        if not file.startswith((_JAX_FOLDER, "<")) and file != __file__:
            return f"{file}:{outer.f_lineno} ({outer.f_code.co_name})"
    return ""
