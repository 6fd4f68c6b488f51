"""Tokens from a language model, in fixed shapes: one program reads the prompt, one makes a token from the token before.

The prompt is padded to a power of two, so that prompts of similar lengths share a program. Effective weights are formed
once, in the dtype of the forward pass: low-bit ones become plain, adapters stay beside them, as in training. A sample's
randomness comes from the seed, its row and the position: it does not depend on the devices or on the other samples.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from tinypod import sharding
from tinypod.errors import UserError
from tinypod.generate.sampling import GREEDY, Sampling, choose
from tinypod.models import decoding, qwen3
from tinypod.models.decoding import KVCache
from tinypod.models.qwen3 import Params
from tinypod.weights.language_model import LanguageModel

SHORTEST = 16  # tokens that a prompt is padded to at least


class Generator:
    """A model made ready to generate; `known_tokens`: how many the tokenizer has, no others are chosen."""

    def __init__(self, model: LanguageModel, sampling: Sampling = GREEDY, known_tokens: int | None = None) -> None:
        self.config, self.mesh = model.config, model.mesh
        self.params, specs = form_weights(model)
        placement = sharding.place(model.mesh, specs)
        cache = NamedSharding(model.mesh, decoding.CACHE_SPEC)
        whole = sharding.replicated(model.mesh)

        def advance(
            params: Params, cache: KVCache, tokens_BT: Array, start: Array, last: Array, seed: Array
        ) -> tuple[KVCache, Array]:
            """`last`: the position of the token to go on from, the first of these being at `start`."""
            tokens_BT = jax.lax.with_sharding_constraint(tokens_BT, sharding.over_batch(model.mesh))
            hidden_BTD, cache = decoding.extend(self.config, params, cache, tokens_BT, start, placement)
            hidden_BD = jax.lax.dynamic_index_in_dim(hidden_BTD, last - start, axis=1, keepdims=False)
            logits_BV = qwen3.head(self.config, params, placement)(hidden_BD)
            if known_tokens is not None and known_tokens < self.config.vocab_size:
                is_known_1V = (jnp.arange(self.config.vocab_size) < known_tokens)[None]
                logits_BV = jnp.where(is_known_1V, logits_BV, -jnp.inf)
            key_of = lambda row: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), last)  # noqa: E731
            keys_B = jax.vmap(key_of)(jnp.arange(tokens_BT.shape[0]))
            return cache, choose(logits_BV, keys_B, sampling)[:, None]

        self._advance = jax.jit(advance, donate_argnums=1, out_shardings=(cache, whole))
        self._init_cache = jax.jit(
            lambda rows, length: decoding.init_cache(self.config, rows, length),
            static_argnums=(0, 1),
            out_shardings=cache,
        )

    def __call__(self, prompt: Sequence[int], count: int, samples: int = 1, seed: int = 0) -> Iterator[np.ndarray]:
        """Up to `count` times the next token of every sample, int32 [samples]. It is for the caller to stop."""
        check_prompt(prompt, self.config.vocab_size)
        shards = sharding.num_batch_shards(self.mesh)
        rows = -(-samples // shards) * shards
        width = max(SHORTEST, 1 << (len(prompt) - 1).bit_length())
        ids = np.zeros((rows, width), np.int32)
        ids[:, : len(prompt)] = prompt
        tokens = sharding.put(ids, sharding.over_batch(self.mesh))
        cache = self._init_cache(rows, width + count)
        start, last = 0, len(prompt) - 1
        waiting: list[Array] = []
        for _ in range(count):
            # The next step is on its way before the host looks at this one's token.
            cache, tokens = self._advance(self.params, cache, tokens, np.int32(start), np.int32(last), np.uint32(seed))
            waiting.append(tokens)
            start = last = last + 1
            if len(waiting) > 1:
                yield np.asarray(waiting.pop(0))[:samples, 0]
        yield np.asarray(waiting.pop())[:samples, 0]


def check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    if len(prompt) == 0:
        raise UserError("the prompt is empty: give at least one token to continue")
    if unknown := [token for token in prompt if not 0 <= token < vocab_size]:
        raise UserError(
            f"the prompt has token {unknown[0]}, but the model has only {vocab_size}: is --tokenizer that of the model?"
        )


def form_weights(model: LanguageModel) -> tuple[Params, Any]:
    """Effective weights, embedding and head in the forward pass's dtype, adapters as they are; and their specs."""
    config = model.config

    def form(params: Params) -> Params:
        formed = qwen3.prepare(config, params, config.dtype)
        return formed | {name: params[name].astype(config.dtype) for name in ("embed", "head") if name in params}

    shapes = jax.eval_shape(form, model.params)
    specs = sharding.param_specs(qwen3.sharding_rules(config, prepared=True), shapes, model.mesh)
    return jax.jit(form, out_shardings=sharding.named(model.mesh, specs))(model.params), specs
