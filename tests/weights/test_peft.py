"""Adapters in PEFT's format, compared with PEFT itself."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft as reference
import pytest
import torch
from safetensors.numpy import load_file, save_file

from language_models import SHAPE, in_transformers, make_model, our_logits, their_logits
from tinypod.errors import ConfigError, UserError
from tinypod.models import lora
from tinypod.models.qwen3 import Qwen3Config
from tinypod.weights import peft
from tinypod.weights.convert import merge, with_adapters, without_adapters
from tinypod.weights.exporting import write_weights

ALL = ["q", "k", "v", "o", "gate", "up", "down"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "the usual": {"rank": 3},
    "every layer, alpha twice the rank": {"rank": 4, "alpha": 8.0, "targets": ALL},
    "two layers, a scale below 1": {"rank": 2, "alpha": 0.5, "targets": ["k", "down"]},
}
TOKENS = np.arange(22).reshape(2, 11) * 7 % 264


@pytest.mark.parametrize("kind", ADAPTERS)
def test_peft_merges_our_adapter_as_we_do(tmp_path: Path, kind: str) -> None:
    config, params = make_model(lora=ADAPTERS[kind])
    base = in_transformers(tmp_path / "base", *without_adapters(config, params))
    peft.write_adapter(tmp_path / "adapter", config, params, str(tmp_path / "base"))
    model = reference.PeftModel.from_pretrained(base, tmp_path / "adapter")
    np.testing.assert_allclose(their_logits(model, TOKENS), our_logits(config, params, TOKENS), rtol=1e-4, atol=1e-5)
    theirs = model.merge_and_unload().state_dict()
    ours = in_transformers(tmp_path / "merged", *merge(config, params)).state_dict()
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        np.testing.assert_allclose(value.numpy(), theirs[name].numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_an_adapter_made_by_peft_gives_the_same_logits(tmp_path: Path) -> None:
    plain, params = make_model()
    torch.manual_seed(0)
    model = reference.get_peft_model(
        in_transformers(tmp_path / "base", plain, params),
        reference.LoraConfig(
            r=3, lora_alpha=7, target_modules=["q_proj", "gate_proj", "o_proj"], task_type="CAUSAL_LM", lora_dropout=0.1
        ),
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(tmp_path / "adapter")
    config = plain.model_copy(update={"lora": lora.Lora(rank=3, alpha=7.0, targets=["q", "o", "gate"])})
    adapters = jax.tree.map(jnp.asarray, peft.read_adapter(tmp_path / "adapter", config))
    found = our_logits(config, with_adapters(params, adapters), TOKENS)
    np.testing.assert_allclose(found, their_logits(model, TOKENS), rtol=1e-4, atol=1e-5)
    assert np.abs(found - our_logits(plain, params, TOKENS)).max() > 0.1


def test_out_and_in_to_the_bit(tmp_path: Path) -> None:
    config, params = make_model(lora=ADAPTERS["every layer, alpha twice the rank"], low_bit="q4a4")
    peft.write_adapter(tmp_path, config, params, None)
    for name, parts in peft.read_adapter(tmp_path, config).items():
        leaf = (params["layers"]["attention"] | params["layers"]["mlp"])[name]
        for part, value in parts.items():
            assert value.shape == leaf[part].shape
            np.testing.assert_array_equal(value, np.asarray(leaf[part]), err_msg=f"{name} {part}")


def test_the_base_of_low_bit_weights_comes_along(tmp_path: Path) -> None:
    config, params = make_model(lora=ADAPTERS["the usual"], low_bit="q2a4")
    note = write_weights(tmp_path / "alone", config, params, format="peft", origin="Qwen3-0.6B")
    assert "--base FOLDER" in note
    assert json.loads((tmp_path / "alone" / peft.CONFIG).read_text())["base_model_name_or_path"] is None
    write_weights(tmp_path / "adapter", config, params, "float32", "peft", tmp_path / "base")
    model = reference.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    np.testing.assert_allclose(their_logits(model, TOKENS), our_logits(config, params, TOKENS), rtol=1e-4, atol=1e-5)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    peft.write_adapter(tmp_path / "adapter", *make_model(lora={"rank": 3, "targets": ["q", "v"]}), None)
    return tmp_path / "adapter"


def with_lora(**changes: Any) -> Qwen3Config:
    return Qwen3Config.model_validate(SHAPE | {"lora": {"rank": 3, "targets": ["v", "q"]} | changes})


def test_another_kind_of_adapter_is_refused_with_what_differs(adapter: Path) -> None:
    assert set(peft.read_adapter(adapter, with_lora())) == {"q", "v"}
    with pytest.raises(ConfigError) as caught:
        peft.read_adapter(adapter, with_lora(rank=4, alpha=1.0, targets=["q", "k"]))
    for line in ("rank: 4 here, 3 there", "alpha: 1.0 here, 3.0 there", "targets: ['k', 'q'] here, ['q', 'v'] there"):
        assert f"model.lora.{line}" in str(caught.value)
    with pytest.raises(ConfigError, match=r"model\.lora: not set"):
        peft.read_adapter(adapter, Qwen3Config.model_validate(SHAPE))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("use_dora", True),
        ("use_rslora", True),
        ("fan_in_fan_out", True),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 4}),
        ("modules_to_save", ["lm_head"]),
        ("layers_to_transform", [0]),
        ("something_of_tomorrow", {"a": 1}),
    ],
)
def test_what_plain_lora_does_not_have_is_refused_by_name(adapter: Path, key: str, value: Any) -> None:
    theirs = json.loads((adapter / peft.CONFIG).read_text())
    (adapter / peft.CONFIG).write_text(json.dumps(theirs | {key: value}))
    with pytest.raises(UserError, match=f"{key} is "):
        peft.read_adapter(adapter, with_lora())


def test_bad_files_are_refused(adapter: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / peft.TENSORS)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for changed, message in (
        ({key: x for key, x in tensors.items() if key != first}, f"no {first}"),
        (tensors | {first: tensors[first][:, :-1].copy()}, r"\(3, 23\), expected \(3, 24\)"),
        (tensors | {"base_model.model.lm_head.weight": np.zeros((2, 2))}, "lm_head.weight cannot be used"),
        (tensors | {first.replace("layers.0", "layers.2"): tensors[first]}, "layers.2.* cannot be used"),
    ):
        save_file(changed, adapter / peft.TENSORS)
        with pytest.raises(UserError, match=message):
            peft.read_adapter(adapter, with_lora())
    (adapter / peft.TENSORS).write_bytes((adapter / peft.TENSORS).read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be read"):
        peft.read_adapter(adapter, with_lora())
    (adapter / peft.TENSORS).unlink()
    with pytest.raises(UserError, match="saved by PEFT as safetensors"):
        peft.read_adapter(adapter, with_lora())
    with pytest.raises(UserError, match="expected the folder of a PEFT adapter"):
        peft.read_adapter(tmp_path, with_lora())
    with pytest.raises(UserError, match="no adapters to write"):
        peft.write_adapter(tmp_path, *make_model(), None)
