"""Compiles after warm-up: found, named, and silent otherwise."""

import logging
import threading

import jax
import numpy as np
import pytest

from tinypod.errors import RecompileError
from tinypod.health.recompiles import CompileGuard


def make_scaled():
    @jax.jit
    def scaled(x):
        return x * x + x

    return scaled


def array(size: int):
    return jax.device_put(np.ones(size, np.float32))


def test_a_compile_after_warm_up_stops_and_says_which_and_where():
    scaled, x, y = make_scaled(), array(4), array(5)
    with CompileGuard(lambda: "stepping") as guard:
        scaled(x)
        guard.check()
        guard.warm()
        scaled(x)  # compiled already: silence
        guard.check()
        scaled(y)
        with pytest.raises(RecompileError) as caught:
            guard.check()
        guard.check()  # told once
    text = str(caught.value)
    assert text.startswith("jit(scaled) was compiled after warm-up, while stepping (")
    assert "test_recompiles.py:" in text
    assert f"({test_a_compile_after_warm_up_stops_and_says_which_and_where.__name__})" in text
    assert "health.on_recompile=warn" in text


def test_compiled_ahead_of_time():
    scaled = make_scaled()
    with CompileGuard(lambda: "evaluating") as guard:
        guard.warm()
        for size in (5, 6):
            scaled.lower(jax.ShapeDtypeStruct((size,), np.float32)).compile()
        with pytest.raises(RecompileError, match=r"while evaluating[\s\S]*and 1 more"):
            guard.check()


@pytest.mark.parametrize("phase", ["compiling", "starting", "restoring", "closing"])
def test_some_phases_may_compile(phase):
    with CompileGuard(lambda: phase) as guard:
        guard.warm()
        make_scaled()(array(4))
        guard.check()


def test_nothing_is_said_while_cold(capfd):
    with CompileGuard(lambda: "stepping") as guard:
        make_scaled()(array(4))
        guard.warm()
        guard.check()
    assert capfd.readouterr() == ("", "")


def test_a_warning_goes_on():
    scaled, x, y = make_scaled(), array(4), array(5)
    said: list[str] = []
    with CompileGuard(lambda: "stepping", "warn", said.append) as guard:
        guard.warm()
        scaled(x)
        scaled(y)
        guard.check()
        guard.check()
    assert ["jit(scaled)" in text for text in said] == [True, True]


def test_other_threads_are_not_the_loop():
    scaled, x = make_scaled(), array(6)
    with CompileGuard(lambda: "stepping") as guard:
        guard.warm()
        thread = threading.Thread(target=scaled, args=(x,))
        thread.start()
        thread.join()
        guard.check()


def test_nothing_of_jax_or_logging_stays_changed():
    def settings():
        levels = {name: logging.getLogger(name).level for name in logging.Logger.manager.loggerDict if "jax" in name}
        return dict(jax.config.values), levels

    from jax._src import monitoring

    before, listeners = settings(), list(monitoring.get_event_duration_listeners())
    with pytest.raises(KeyError), CompileGuard(lambda: "stepping"):
        raise KeyError
    assert settings() == before
    assert list(monitoring.get_event_duration_listeners()) == listeners
