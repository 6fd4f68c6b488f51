"""Generated tokens against those of `transformers`, on one device and on eight."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from tinypod import sharding
from tinypod.errors import UserError
from tinypod.generate.generator import Generator
from tinypod.generate.sampling import Sampling
from tinypod.models import qwen3
from tinypod.models.qwen3 import Qwen3Config
from tinypod.weights import convert, hugging_face
from tinypod.weights.language_model import LanguageModel

SHAPE = dict(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48)
PROMPT = [5, 60, 3, 17, 17, 9]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"tied": False},
    "LoRA over low-bit": {"low_bit": "q4a4", "lora": {"rank": 2}, "tied": False},
}


def make_model(form: str, **mesh: int) -> LanguageModel:
    config = Qwen3Config.model_validate(SHAPE | {"dtype": "float32"} | FORMS[form])

    def init() -> Any:  # random in every leaf, norms and adapters, too
        leaves, tree = jax.tree.flatten(qwen3.init(config, jax.random.key(1)))
        noise = [0.2 * jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(leaves)]
        return tree.unflatten(x if x.dtype == jnp.uint8 else x + n for x, n in zip(leaves, noise, strict=True))

    params = jax.jit(init)()
    devices = sharding.make_mesh(sharding.MeshConfig(**(mesh or {"devices": 1})))
    specs = sharding.param_specs(qwen3.sharding_rules(config), params, devices)
    return LanguageModel("random", config, jax.device_put(params, sharding.named(devices, specs)), devices)


def tokens_of(generator: Generator, count: int, **options: int) -> np.ndarray:
    return np.stack(list(generator(PROMPT, count, **options)), axis=1)


@pytest.mark.parametrize("form", FORMS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, form: str) -> None:
    model = make_model(form)
    hugging_face.write_params(tmp_path, *convert.merge(model.config, model.params), "float32")
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path).eval()
    inputs = torch.tensor([PROMPT])
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = theirs.generate(inputs, attention_mask=torch.ones_like(inputs), **options)[0, len(PROMPT) :].numpy()
    assert len(set(expected.tolist())) > 5
    np.testing.assert_array_equal(tokens_of(Generator(model), 20)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}],
    ids=str,
)
def test_eight_devices_say_the_same(mesh: dict[str, int]) -> None:
    drawn = [
        tokens_of(Generator(make_model("LoRA over low-bit", **layout), Sampling(0.8, top_p=0.9)), 8, samples=3)
        for layout in ({}, mesh)
    ]
    assert len(np.unique(drawn[0])) > 5
    np.testing.assert_array_equal(*drawn)


@pytest.mark.slow
def test_a_seed_decides_each_sample_for_itself() -> None:
    model = make_model("plain")
    hot, coldest = Generator(model, Sampling(1.5)), Generator(model, Sampling(1.5, top_k=1))
    three = tokens_of(hot, 10, samples=3, seed=4)
    np.testing.assert_array_equal(tokens_of(hot, 10, samples=3, seed=4), three)
    np.testing.assert_array_equal(tokens_of(hot, 10, samples=1, seed=4), three[:1])
    assert not np.array_equal(three[0], three[1])
    assert not np.array_equal(tokens_of(hot, 10, samples=1, seed=5), three[:1])
    np.testing.assert_array_equal(tokens_of(coldest, 10), tokens_of(Generator(model), 10))


def test_programs_are_compiled_once_and_serve_prompts_of_other_lengths() -> None:
    generator = Generator(make_model("plain"))
    for prompt in ([3], PROMPT, list(range(16))):
        assert len(list(generator(prompt, 5))) == 5
    assert generator._advance._cache_size() == 2  # the prompt's and the next token's


def test_only_tokens_that_the_tokenizer_has_are_chosen() -> None:
    model = make_model("plain")
    assert tokens_of(Generator(model), 20).max() >= 10
    assert tokens_of(Generator(model, known_tokens=10), 20).max() < 10


@pytest.mark.parametrize(("prompt", "message"), [([], "the prompt is empty"), ([1, 64], "token 64, but the model")])
def test_a_prompt_that_cannot_be_continued_is_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        next(Generator(make_model("plain"))(prompt, 1))
