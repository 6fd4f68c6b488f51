"""Losses against float64 written out from their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinypod.tasks.distill_losses import kd_divergence, position_terms, row_sums

RNG = np.random.default_rng(0)
B, L, V, K = 2, 7, 40, 5


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def cached(teacher: np.ndarray, temperature: float) -> dict[str, jax.Array]:
    idx = np.argsort(-teacher, axis=-1)[..., :K]
    logz = np.log(np.exp(teacher / temperature).sum(axis=-1))
    top = np.take_along_axis(teacher, idx, axis=-1)
    return {"topk_idx": jnp.asarray(idx), "topk_logits": jnp.asarray(top, jnp.float32), "logz": jnp.asarray(logz)}


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_terms_are_those_of_their_definitions(temperature: float) -> None:
    teacher, student = 3 * RNG.standard_normal((2, B, L, V))
    labels = RNG.integers(0, V, (B, L))
    known = {
        name: x.astype(jnp.float32) if name != "topk_idx" else x for name, x in cached(teacher, temperature).items()
    }
    known["labels"] = jnp.asarray(labels)
    p, q = log_softmax(teacher / temperature), log_softmax(student / temperature)
    idx = np.asarray(known["topk_idx"])
    inside_p, inside_q = (np.take_along_axis(x, idx, axis=-1) for x in (p, q))
    rest_p, rest_q = (np.log(1 - np.exp(x).sum(axis=-1)) for x in (inside_p, inside_q))
    tail = (np.exp(inside_p) * (inside_p - inside_q)).sum(axis=-1) + np.exp(rest_p) * (rest_p - rest_q)
    over_k = [log_softmax(np.take_along_axis(x, idx, axis=-1) / temperature) for x in (teacher, student)]
    renormalised = (np.exp(over_k[0]) * (over_k[0] - over_k[1])).sum(axis=-1)
    expected = {
        "label_loss": -np.take_along_axis(log_softmax(student), labels[..., None], axis=-1)[..., 0],
        "top1_loss": -np.take_along_axis(log_softmax(student), idx[..., :1], axis=-1)[..., 0],
        "agreement": (student.argmax(axis=-1) == idx[..., 0]).astype(float),
        "label_accuracy": (student.argmax(axis=-1) == labels).astype(float),
    }
    logits, same = jnp.asarray(student, jnp.float32), jnp.eye(V, dtype=jnp.float32)
    for kind, kd in (("tail", tail), ("renormalised", renormalised)):
        terms = position_terms(logits, same, known, kind, temperature)  # type: ignore[arg-type]
        for name, value in (expected | {"kd_loss": temperature**2 * kd}).items():
            np.testing.assert_allclose(terms[name], value, rtol=2e-4, atol=2e-5, err_msg=f"{kind} {name}")


def test_the_tail_sees_mass_outside_of_k_and_the_renormalised_form_does_not() -> None:
    """A student that is the teacher inside K, with two thirds of its mass outside."""
    teacher = np.zeros(V)
    teacher[:K], teacher[K:] = 10.0, -10.0
    student = teacher.copy()
    student[K:] = np.log(2 * K * np.exp(10.0) / (V - K))
    known = cached(teacher, 1.0)
    at_k, logz = jnp.asarray(student[:K], jnp.float32), jnp.asarray(np.log(np.exp(student).sum()), jnp.float32)
    arguments = (known["topk_logits"], known["logz"].astype(jnp.float32), at_k, logz, 1.0)
    assert abs(float(kd_divergence("renormalised", *arguments))) < 1e-6
    assert float(kd_divergence("tail", *arguments)) == pytest.approx(np.log(3), rel=1e-4)


def test_a_student_without_any_mass_outside_has_a_finite_loss_and_gradient() -> None:
    teacher = jnp.asarray([0.0, 0.0])

    def loss(student: jax.Array) -> jax.Array:
        return kd_divergence("tail", teacher, jnp.log(4.0), student, jax.nn.logsumexp(student), 1.0)

    student = jnp.asarray([40.0, 40.0])
    assert np.isfinite(float(loss(student)))
    assert np.isfinite(np.asarray(jax.grad(loss)(student))).all()


@pytest.mark.parametrize("stretch", [2, 3, 7, 100])
def test_stretches_add_up_to_the_whole_and_masks_count(stretch: int) -> None:
    hidden = jnp.asarray(RNG.standard_normal((B, L, 6)), jnp.float32)
    weight = jnp.asarray(RNG.standard_normal((6, V)), jnp.float32)
    teacher = RNG.standard_normal((B, L, V))
    known = {name: x.astype(jnp.float32) if name != "topk_idx" else x for name, x in cached(teacher, 1.0).items()}
    known["labels"] = jnp.asarray(RNG.integers(0, V, (B, L)))
    mask = jnp.asarray(RNG.integers(0, 2, (B, L)))

    def total(hidden: jax.Array, stretch: int) -> jax.Array:
        return jnp.sum(row_sums(hidden, weight, known, mask, stretch, "tail", 1.0)["kd_loss"])

    sums = row_sums(hidden, weight, known, mask, stretch, "tail", 1.0)
    terms = position_terms(hidden, weight, known, "tail", 1.0)
    for name, value in terms.items():
        np.testing.assert_allclose(
            sums[name], jnp.sum(value * mask.astype(jnp.float32), axis=-1), rtol=1e-4, atol=1e-5, err_msg=name
        )
    np.testing.assert_array_equal(sums["tokens"], mask.sum(axis=-1))
    np.testing.assert_allclose(
        jax.grad(total)(hidden, stretch), jax.grad(lambda h: total(h, L))(hidden), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kind", ["tail", "renormalised"])
def test_gradients_are_those_of_autodiff(kind: str, temperature: float) -> None:
    """Of the same terms from logits that are there in full; a label is also among the top K, and one id comes twice."""
    hidden, weight = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((B, L, 6), (6, V)))
    teacher = RNG.standard_normal((B, L, V))
    known = {
        name: x.astype(jnp.float32) if name != "topk_idx" else x for name, x in cached(teacher, temperature).items()
    }
    known["topk_idx"] = known["topk_idx"].at[:, :, 3].set(known["topk_idx"][:, :, 2])
    known["labels"] = jnp.where(
        jnp.arange(L)[None] % 2, known["topk_idx"][..., 1], jnp.asarray(RNG.integers(0, V, (B, L)))
    )
    shares = {"kd_loss": 1.0, "top1_loss": 0.2, "label_loss": 0.3}

    def written(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        terms = position_terms(hidden, weight, known, kind, temperature)  # type: ignore[arg-type]
        return sum((share * jnp.sum(terms[name]) for name, share in shares.items()), jnp.float32(0))

    def plain(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        logits = hidden @ weight
        logz, hot = (jax.nn.logsumexp(logits / t, axis=-1) for t in (1.0, temperature))

        def at(ids: jax.Array) -> jax.Array:
            return jnp.take_along_axis(logits, ids, axis=-1)

        top = known["topk_idx"]
        kd = kd_divergence(kind, known["topk_logits"], known["logz"], at(top), hot, temperature)  # type: ignore[arg-type]
        top1, label = logz - at(top[..., :1])[..., 0], logz - at(known["labels"][..., None])[..., 0]
        return jnp.sum(kd + 0.2 * top1 + 0.3 * label)

    np.testing.assert_allclose(written(hidden, weight), plain(hidden, weight), rtol=1e-5)
    found, expected = (jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, weight) for loss in (written, plain))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
