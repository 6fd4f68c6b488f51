"""Compiles after warm-up: found, explained, and silent otherwise."""

import functools
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tinypod.errors import RecompileError
from tinypod.health.recompiles import CompileGuard


def make_scaled():
    @functools.partial(jax.jit, static_argnames="power")
    def scaled(x, weights, power=1):
        return (x * weights["w"]) ** power

    return scaled


def array(*shape: int, dtype=np.float32):
    return jax.device_put(np.ones(shape, dtype))


def recompile(function, *calls, warm=("stepping",), phase="stepping") -> str:
    """What the guard says about the last call, after the others have warmed it up."""
    with CompileGuard(lambda: phase) as guard:
        for args, kwargs in calls[:-1]:
            function(*args, **kwargs)
        for kind in warm:
            guard.warm(kind)
        guard.check()
        args, kwargs = calls[-1]
        function(*args, **kwargs)
        with pytest.raises(RecompileError) as caught:
            guard.check()
        guard.check()  # told once
    return str(caught.value)


def test_a_shape_is_named_by_its_argument_with_before_and_after():
    x, y = array(16, 8), array(17, 8)
    text = recompile(make_scaled(), ((x, {"w": x}), {}), ((y, {"w": y}), {}))
    assert "jit(scaled)" in text
    assert "x: float32[16,8] -> float32[17,8]" in text
    assert "weights.w: float32[16,8] -> float32[17,8]" in text
    assert "test_recompiles.py:" in text
    assert "(recompile)" in text
    assert "health.on_recompile=warn" in text


def test_a_dtype():
    x, y = array(4), array(4, dtype=np.float16)
    text = recompile(make_scaled(), ((x, {"w": x}), {}), ((y, {"w": y}), {}))
    assert "x: float32[4] -> float16[4]" in text


@pytest.mark.parametrize("calls", [({"power": 2}, {"power": 3}), ({}, {"power": 3})])
def test_a_static_value(calls):
    x = array(4)
    text = recompile(make_scaled(), *(((x, {"w": x}), kwargs) for kwargs in calls))
    assert f"static power: {calls[0].get('power', 'its default')} -> 3" in text
    assert "changed: x" not in text


def test_a_static_value_given_by_position():
    text = recompile(make_scaled(), ((array(4), {"w": array(4)}, 2), {}), ((array(4), {"w": array(4)}, 3), {}))
    assert "static power: 2 -> 3" in text


def test_a_weak_type():
    double = jax.jit(lambda x: x + x)
    text = recompile(double, ((jnp.float32(1),), {}), ((1.0,), {}))
    assert "x: float32[] -> float32[] (weak type)" in text


def test_a_sharding():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    split, whole = (jax.device_put(array(4), NamedSharding(mesh, PartitionSpec(axis))) for axis in ("data", None))
    text = recompile(jax.jit(lambda x: x + x), ((split,), {}), ((whole,), {}))
    assert f"x: float32[4] on {split.sharding.spec} -> on {whole.sharding.spec}" in text


def test_the_closest_earlier_call_is_compared_with():
    x, y = array(4), array(5)
    text = recompile(
        make_scaled(),
        ((x, {"w": x}, 2), {}),
        ((y, {"w": y}, 3), {}),
        ((x, {"w": x}, 3), {}),
    )
    assert "static power: 2 -> 3" in text
    assert "float32[5]" not in text


def test_a_new_function():
    warmed, new = jax.jit(lambda x: x - x), jax.jit(lambda x: x * x)
    x = array(3)

    def call(function):
        return function(x)

    assert "had not been compiled before" in recompile(call, ((warmed,), {}), ((new,), {}))
    first = make_scaled()
    assert "had not been compiled before" in recompile(lambda: first(x, {"w": x}), ((), {}))


def test_a_function_that_is_defined_anew_for_each_call():
    text = recompile(lambda x: make_scaled()(x, {"w": x}), ((array(3),), {}), ((array(3),), {}))
    assert "defined anew" in text


def test_a_setting_of_jax():
    x = array(3, 3)
    dot = jax.jit(lambda x: x @ x)

    def call(precision):
        with jax.default_matmul_precision(precision):
            return dot(x)

    assert "a JAX setting" in recompile(call, (("float32",), {}), (("bfloat16",), {}))


def test_compiled_ahead_of_time():
    scaled = make_scaled()

    def call(size):
        abstract = jax.ShapeDtypeStruct((size,), np.float32)
        return scaled.lower(abstract, {"w": abstract}).compile()

    assert "x: float32[5] -> float32[6]" in recompile(call, ((5,), {}), ((6,), {}))


def test_what_the_frames_do_not_say_leaves_the_function(monkeypatch):
    monkeypatch.setattr("tinypod.health.recompiles._CALL_FRAMES", ())  # as if a later JAX had renamed them
    x, y = array(4), array(5)
    text = recompile(make_scaled(), ((x, {"w": x}), {}), ((y, {"w": y}), {}))
    assert "jit(scaled) was compiled after warm-up" in text
    assert "test_recompiles.py" in text


def test_warmed_phases_only(capfd):
    phase = "stepping"
    scaled, x, y = make_scaled(), array(4), array(5)
    with CompileGuard(lambda: phase) as guard:
        guard.warm("stepping")
        phase = "evaluating"
        scaled(x, {"w": x})
        guard.check()
        phase = "stepping"
        scaled(x, {"w": x})  # compiled already: silence
        guard.check()
        guard.warm("evaluating")
        phase = "evaluating"
        scaled(y, {"w": y})
        with pytest.raises(RecompileError, match="while evaluating"):
            guard.check()
    assert capfd.readouterr() == ("", "")


def test_a_warning_goes_on():
    scaled, x, y = make_scaled(), array(4), array(5)
    said: list[str] = []
    with CompileGuard(lambda: "stepping", "warn", said.append) as guard:
        guard.warm("stepping")
        scaled(x, {"w": x})
        scaled(y, {"w": y})
        guard.check()
        guard.check()
    assert ["-> float32[5]" in text for text in said] == [False, True]


def test_other_threads_are_not_the_loop():
    scaled, x = make_scaled(), array(6)
    with CompileGuard(lambda: "stepping") as guard:
        guard.warm("stepping")
        thread = threading.Thread(target=scaled, args=(x, {"w": x}))
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
