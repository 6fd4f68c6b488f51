"""Packed low-bit weights, read again by the package and by what the format's description says."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from language_models import make_model, our_logits
from tinypod.errors import UserError
from tinypod.models import low_bit, qwen3
from tinypod.models.qwen3 import LINEARS, Qwen3Config
from tinypod.runs.checksums import flatten
from tinypod.weights import hugging_face, language_model, packed
from tinypod.weights.exporting import write_weights

FORMS: dict[str, dict[str, Any]] = {
    "2 and 4 bits, tied": {"low_bit": "q2a4"},
    "2 and 3 bits, rows that end inside of a byte": {
        "low_bit": {"mlp_bits": 2, "mlp_rank": 2, "attention_bits": 3, "attention_rank": 5},
        "hidden_size": 23,
        "mlp_size": 33,
        "tied": False,
    },
    "6 bits": {"low_bit": {"mlp_bits": 6, "mlp_rank": 1, "attention_bits": 6, "attention_rank": 2}},
}


def effective(config: Qwen3Config, params: Any, name: str) -> np.ndarray:
    """Of the last layer, [*in, *out]."""
    leaf = (params["layers"]["attention"] | params["layers"]["mlp"])[name]
    return np.asarray(low_bit.effective({part: jnp.asarray(x[-1]) for part, x in leaf.items()}, config.bits(name)))


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 17), st.randoms())
def test_indices_survive_packing(bits: int, rows: int, count: int, random: Any) -> None:
    index = np.array([[random.randrange(2**bits) for _ in range(count)] for _ in range(rows)], np.uint8)
    small = packed.pack(index, bits)
    assert small.dtype == np.uint8
    assert small.shape == (rows, -(-count * packed.width_of(bits) // 8))
    np.testing.assert_array_equal(packed.unpack(small, bits, count), index)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_comes_back(tmp_path: Path, form: str) -> None:
    config, params = make_model(**FORMS[form])
    packed.write(tmp_path / "exact", config, params, "float32")
    found, again = packed.read(tmp_path / "exact", dtype="float32")
    low = config.quantisation
    assert found == config.model_copy(update={"low_bit": low})
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(np.asarray(flatten(again)[path]), np.asarray(leaf), err_msg=path)
    np.testing.assert_array_equal(effective(found, again, "o"), effective(config, params, "o"))

    packed.write(tmp_path / "half", config, params, "float16")
    _, again = packed.read(tmp_path / "half")
    for path, leaf in flatten(params).items():
        if path.endswith(("index", ".g")):
            np.testing.assert_array_equal(np.asarray(flatten(again)[path]), np.asarray(leaf), err_msg=path)
    for name in ("q", "o", "down"):
        expected = effective(config, params, name)
        difference = np.sqrt(np.mean((effective(config, again, name) - expected) ** 2) / np.mean(expected**2))
        assert 1e-6 < difference < 2**-10, (name, difference)  # two factors, each rounded to 2^-11


def test_the_file_is_as_described(tmp_path: Path) -> None:
    """Decoded a second time, from the description alone."""
    config, params = make_model(low_bit="q2a4")
    packed.write(tmp_path, config, params, "float16")
    tensors = load_file(tmp_path / "model.safetensors")
    for key, name, bits in (("mlp.down_proj", "down", 2), ("self_attn.o_proj", "o", 4), ("self_attn.q_proj", "q", 4)):
        parts = {part: tensors[f"model.layers.1.{key}.{part}"] for part in ("index", "A", "B", "g")}
        a, b = parts["A"].astype(np.float64), parts["B"].astype(np.float64)
        a, b = a / np.linalg.norm(a, axis=0), b / np.linalg.norm(b, axis=1)[:, None]
        index = np.array(
            [
                [byte >> (bits * k) & (2**bits - 1) for byte in row.tolist() for k in range(8 // bits)]
                for row in parts["index"]
            ]
        )
        weight = (2 * index / (2**bits - 1) - 1) * (a * parts["g"] @ b)
        expected = effective(config, params, name).reshape(weight.shape[::-1]).T
        np.testing.assert_allclose(weight, expected, rtol=0, atol=2e-3 * np.abs(expected).max(), err_msg=name)


def test_it_is_small_and_says_so(tmp_path: Path) -> None:
    config, params = make_model(low_bit="q4a4")
    leaves = params["layers"]["attention"] | params["layers"]["mlp"]
    for name, leaf in leaves.items():
        if name in LINEARS:
            leaf["g"] = low_bit.snap(leaf["g"])
    params["embed"] = params["embed"].astype("bfloat16").astype("float32")
    said = write_weights(tmp_path, config, params, format="packed")
    expected = qwen3.bits_per_weight(config)
    assert f": {expected:.2f} bits per weight" in said
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.g"].dtype == np.float16
    assert tensors["model.embed_tokens.weight"].dtype == "bfloat16"
    assert json.loads((tmp_path / packed.ABOUT).read_text())["bits_per_weight"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_a_language_model_is_loaded_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, params = make_model(low_bit="q4a4")
    monkeypatch.setattr(hugging_face, "SHARD_BYTES", 9000)  # several files
    packed.write(tmp_path, config, params, "float32")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = language_model.load(str(tmp_path), "dtype=float32")
    tokens = np.arange(16).reshape(2, 8)
    np.testing.assert_allclose(
        our_logits(model.config, model.params, tokens), our_logits(config, params, tokens), rtol=1e-5, atol=1e-6
    )


def test_damage_and_other_versions_are_refused(tmp_path: Path) -> None:
    config, params = make_model(low_bit="q4a4")
    packed.write(tmp_path, config, params)
    with pytest.raises(UserError, match="is not empty"):
        packed.write(tmp_path, config, params)
    file, about = tmp_path / "model.safetensors", json.loads((tmp_path / packed.ABOUT).read_text())
    whole = file.read_bytes()
    for broken in (whole[:-1000], whole[:50], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(broken)
        with pytest.raises(UserError, match=r"model\.safetensors: not as it was written"):
            packed.read(tmp_path)
    file.write_bytes(whole)
    for changes, message in (
        ({"version": 2}, "of version 2; this tinypod reads 'tinypod packed' of version 1"),
        ({"model": about["model"] | {"mlp_size": 48}}, r"_proj\.\w+ is .*, expected"),
        ({"model": about["model"] | {"vocab_size": 300}}, r"embed is \(264, 24\), expected \(300, 24\)"),
        ({"model": {}}, "not the shape of a model"),
        ({"files": None}, "cannot be read"),
        ({"files": {"../other": ""}}, "leads out of it"),
    ):
        (tmp_path / packed.ABOUT).write_text(json.dumps(about | changes))
        with pytest.raises(UserError, match=message):
            packed.read(tmp_path)


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    for changes, message in (
        ({}, "model.low_bit=q4_r32"),
        ({"low_bit": "q4a4", "lora": {"rank": 2}}, "model.lora=null"),
    ):
        with pytest.raises(UserError, match=message):
            packed.write(tmp_path, *make_model(**changes))
    for dtype, format in (("bfloat16", "packed"), ("float16", "hugging_face"), ("float16", "peft")):
        with pytest.raises(UserError, match=f"--dtype {dtype}"):
            write_weights(tmp_path, *make_model(low_bit="q4a4"), dtype, format)
    assert not any(tmp_path.iterdir())
