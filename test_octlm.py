"""Tests of octlm: every number against an independent reference or against the full pass.

The reference is written from the formulas alone, in float64: one position, one head and one channel
pair at a time. The small models have weights so large that attention is far from uniform: a wrong
mask, head or position moves their logits by far more than any tolerance here.

Contents, each part under a line of its own: helpers and the reference; the model, from the config
to the cached path; the generators, sampling, the modes a caller may be in, compile and memory,
bytes, checkpoint files; a random search over all of that; the trained model and day5.py. Behind the
double line come the tokenizer, training and the scripts, the page and README.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import errno
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import pickle
import platform
import random
import re
import resource
import runpy
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import ANY, MagicMock

import numpy as np
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor

import day5
import octlm
from octlm import Decoder, DecoderConfig, load_checkpoint, save_checkpoint

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE / "checkpoints" / "octlm-26m.pt"
TOKENIZER = HERE / "checkpoints" / "tokenizer.model"

SMALL = DecoderConfig(
    vocab_size=61, context_length=12, n_layers=2, n_heads=8, n_kv_heads=2, d_model=64, d_ff=48
)
FORMS = [
    *({"n_kv_heads": heads, "position": word}
      for heads in (1, 2, 4, 8) for word in ("rope", "learned")),
    *({"rope_base": base, "rope_scale": scale}
      for base, scale in ((50.0, 1.0), (1e4, 4.0), (500.0, 0.3))),
]
WINDOWS = [
    *({"attention_window": window, "kv_compress_block": block} for window, block in
      ((1, 0), (3, 0), (12, 0), (1, 1), (1, 2), (2, 5), (4, 3), (12, 2), (3, 20))),
    {"attention_window": 3, "position": "learned"},
    {"attention_window": 2, "kv_compress_block": 3, "position": "learned"},
    {"attention_window": 3, "kv_compress_block": 3, "rope_base": 50.0, "rope_scale": 0.5},
]
SAMPLED = {"temperature": 0.9, "top_k": 20}

over_forms = pytest.mark.parametrize("form", FORMS, ids=str)
over_attention = pytest.mark.parametrize("attention", ["sdpa", "manual"])
over_positions = pytest.mark.parametrize("position", ["rope", "learned"])
over_paths = pytest.mark.parametrize("cached", [False, True])


# Helpers -----------------------------------------------------------------------------------------


def small_model(seed: int = 0, **changes) -> Decoder:
    """A decoder in eval mode whose weights are as large as a trained one's."""
    model = Decoder(replace(SMALL, **changes)).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=1.5 / math.sqrt(weight.shape[1]))
    return model


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_ids(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(SMALL.vocab_size, (batch, length), generator=seeded(seed))


def assert_near(actual: Tensor, expected: Tensor | np.ndarray, tolerance: float) -> None:
    """Every single number, within an absolute tolerance."""
    expected = torch.as_tensor(expected).to(actual.dtype)
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=0, atol=tolerance)


def in_chunks(model: Decoder, ids: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The logits of all positions [B, T, vocab], by one cached call per chunk."""
    rows, cache = [], None
    for chunk in ids.split(lengths, dim=1):
        logits, cache = model.forward_cached(chunk, cache)
        rows.append(logits)
    return torch.cat(rows, dim=1)


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """All 2 ** (total - 1) ways to cut `total` positions into chunks."""
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


def tensors_of(cache: octlm.Cache) -> list[Tensor]:
    return [tensor for entry in cache for tensor in entry]


def storages_of(cache: octlm.Cache) -> dict[int, int]:
    """Address and bytes of every storage in a cache."""
    storages = [tensor.untyped_storage() for tensor in tensors_of(cache)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def assert_same_weights(actual: Decoder, expected: Decoder) -> None:
    """Bit for bit, and the same dtypes."""
    pairs = zip(actual.named_parameters(), expected.named_parameters(), strict=True)
    for (name, found), (expected_name, weight) in pairs:
        assert name == expected_name and found.dtype == weight.dtype
        assert torch.equal(found, weight), name


def script(path: str) -> ModuleType:
    """One of the scripts, imported."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, HERE / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# The reference -----------------------------------------------------------------------------------


def reference_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt(sum(float(value) ** 2 for value in x) / len(x) + eps) * weight


def reference_rotate(x: np.ndarray, position: int, config: DecoderConfig) -> np.ndarray:
    if config.position == "learned":
        return x
    turned = x.copy()
    for i in range(0, len(x), 2):
        angle = position / config.rope_scale * config.rope_base ** (-i / len(x))
        turned[i] = x[i] * math.cos(angle) - x[i + 1] * math.sin(angle)
        turned[i + 1] = x[i] * math.sin(angle) + x[i + 1] * math.cos(angle)
    return turned


def reference_attend(
    i: int, query: np.ndarray, keys: list, values: list, config: DecoderConfig
) -> np.ndarray:
    """What one head of position i receives: query [D], keys and values one [D] per position."""
    window, block = config.attention_window or len(keys), config.kv_compress_block
    seen = []
    for j in range(len(keys)):
        if i - window < j <= i:
            seen.append((reference_rotate(keys[j], j, config), values[j]))
    for m in range(len(keys) // block if block else 0):
        if (m + 1) * block <= i - window + 1:
            key = sum(keys[m * block : (m + 1) * block]) / block
            value = sum(values[m * block : (m + 1) * block]) / block
            seen.append((reference_rotate(key, m * block + block // 2, config), value))
    query = reference_rotate(query, i, config)
    scores = [float(query @ key) / math.sqrt(len(query)) for key, _ in seen]
    shares = [math.exp(score - max(scores)) for score in scores]
    return sum(share * value for share, (_, value) in zip(shares, seen)) / sum(shares)


def reference_logits(model: Decoder, token_ids: list[int]) -> np.ndarray:
    """The logits [T, vocab] of one sequence."""
    config = model.config
    weights = {name: weight.double().numpy() for name, weight in model.state_dict().items()}
    embedding, eps = weights["token_embedding.weight"], config.norm_eps
    size, shared = config.d_model // config.n_heads, config.n_heads // config.n_kv_heads
    x = [embedding[token] for token in token_ids]
    if config.position == "learned":
        x = [row + weights["position_embedding.weight"][i] for i, row in enumerate(x)]
    for layer in range(config.n_layers):
        start = f"blocks.{layer}."
        part = {name.removeprefix(start).removesuffix(".weight"): weight
                for name, weight in weights.items() if name.startswith(start)}
        normed = [reference_norm(row, part["attention_norm"], eps) for row in x]
        query, key, value = (
            [(part[f"attention.{name}"] @ row).reshape(-1, size) for row in normed]
            for name in ("query", "key", "value")
        )
        for i in range(len(x)):
            heads = []
            for h in range(config.n_heads):
                keys = [row[h // shared] for row in key]
                values = [row[h // shared] for row in value]
                heads.append(reference_attend(i, query[i][h], keys, values, config))
            x[i] = x[i] + part["attention.output"] @ np.concatenate(heads)
            inner = reference_norm(x[i], part["feed_forward_norm"], eps)
            gate, up = part["feed_forward.gate"] @ inner, part["feed_forward.up"] @ inner
            x[i] = x[i] + part["feed_forward.down"] @ (gate / (1 + np.exp(-gate)) * up)
    last = [reference_norm(row, weights["final_norm.weight"], eps) for row in x]
    return np.array([embedding @ row for row in last])


# Config ------------------------------------------------------------------------------------------


def test_defaults_names_and_parameter_count():
    """The default model is the documented one; people load weights by these names."""
    model = Decoder(DecoderConfig(vocab_size=8192))
    assert asdict(model.config) == {
        "vocab_size": 8192, "context_length": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 2,
        "d_model": 512, "d_ff": 1368, "position": "rope", "rope_base": 10000.0, "rope_scale": 1.0,
        "attention": "sdpa", "attention_window": 0, "kv_compress_block": 0, "dropout": 0.0,
        "norm_eps": 1e-6,
    }
    assert model.config.head_size == 64
    assert sum(weight.numel() for weight in model.parameters()) == 26_255_872
    inner = [
        "attention_norm", "attention.query", "attention.key", "attention.value", "attention.output",
        "feed_forward_norm", "feed_forward.gate", "feed_forward.up", "feed_forward.down",
    ]
    names = {f"blocks.{layer}.{name}.weight" for layer in range(8) for name in inner}
    ends = {"token_embedding.weight", "final_norm.weight", "lm_head.weight"}
    assert set(model.state_dict()) == names | ends
    assert model.lm_head.weight is model.token_embedding.weight
    for name, weight in model.named_parameters():
        narrow = name.endswith(("output.weight", "down.weight"))
        if weight.ndim == 1:
            assert (weight == 1).all(), name
        else:  # 4 = sqrt(2 * 8 layers)
            assert weight.std().item() == pytest.approx(0.02 / (4 if narrow else 1), rel=0.02), name


SIZES = ("vocab_size", "context_length", "n_layers", "n_heads", "n_kv_heads", "d_model", "d_ff")
REFUSED = [
    *((name, value) for name in SIZES for value in (0, -1, True, 2.0, "2", None)),
    *((name, value) for name in ("attention_window", "kv_compress_block")
      for value in (-1, False, 1.0, "1", None)),
    *((name, value) for name in ("rope_base", "rope_scale", "norm_eps")
      for value in (0, -1, math.nan, math.inf, -math.inf, 3.5e38, True, "1", None)),
    *(("dropout", value) for value in (-0.1, 1, 1.5, math.nan, math.inf, False, "0", None)),
    *(("position", value) for value in ("alibi", "", "RoPE", None, 0)),
    *(("attention", value) for value in ("flash", "", "SDPA", None, True)),
]


@pytest.mark.parametrize("name, value", REFUSED)
def test_config_refuses_a_value(name: str, value: object):
    """The message names the field, what was expected and what was given."""
    with pytest.raises(ValueError, match=f"^{name} must be .+, got ") as error:
        DecoderConfig(**{"vocab_size": 61, name: value})
    assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize("changes, text", [
    ({"n_kv_heads": 3}, "n_heads must be .*n_kv_heads=3, got 8"),
    ({"n_heads": 2, "n_kv_heads": 4}, "n_heads must be .*n_kv_heads=4, got 2"),
    ({"d_model": 60}, "d_model must be .*n_heads=8, got 60"),
    ({"rope_base": 1e-300}, "rope_scale must be larger .*rope_base=1e-300, got 1.0"),
    ({"rope_scale": 1e-38}, "rope_scale must be larger .*context_length.*, got 1e-38"),
    ({"context_length": 10**400}, "rope_scale must be larger .*context_length.*, got 1.0"),
    ({"d_model": 24}, "head_size must be even .*d_model.*, got 3"),
    ({"attention_window": 13}, "attention_window must be .*context_length=12, got 13"),
    ({"kv_compress_block": 2}, "kv_compress_block must be .*attention_window.*, got 2"),
])
def test_config_refuses_what_does_not_fit_together(changes: dict, text: str):
    with pytest.raises(ValueError, match=f"^{text}$"):
        replace(SMALL, **changes)


def test_config_accepts_the_edges_and_is_frozen():
    for changes in (
        {"d_model": 24, "position": "learned"}, {"attention_window": 12, "kv_compress_block": 100},
        {"rope_base": 1, "rope_scale": 2, "dropout": 0}, {"n_kv_heads": 8, "context_length": 1},
    ):
        assert asdict(replace(SMALL, **changes)) == asdict(SMALL) | changes
    with pytest.raises(FrozenInstanceError):
        SMALL.d_model = 128


# RoPE --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length, head_size, scale, base, start", [
    (7, 8, 1.0, 10000.0, 0), (5, 6, 4.0, 10000.0, 3), (4, 2, 0.5, 3.0, 9), (3, 64, 1.7, 5e5, 509),
])
def test_rope_tables(length: int, head_size: int, scale: float, base: float, start: int):
    bases = {} if base == 10000 else {"base": base}  # 10000 is the default
    cosine, sine = octlm.rope_tables(length, head_size, scale, "cpu", **bases, start=start)
    assert cosine.shape == sine.shape == (length, head_size // 2)
    for row in range(length):
        for pair in range(head_size // 2):
            angle = (start + row) / scale * base ** (-2 * pair / head_size)
            rounding = 1e-7 + 3e-7 * angle  # float32 carries an angle to a relative 6e-8
            assert abs(cosine[row, pair].item() - math.cos(angle)) < rounding
            assert abs(sine[row, pair].item() - math.sin(angle)) < rounding


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_rope_tables_are_float32(default: torch.dtype):
    """In half precision, distant positions would get the same angle."""
    expected = octlm.rope_tables(300, 8, 1.5, "cpu")
    torch.set_default_dtype(default)
    try:
        found = octlm.rope_tables(300, 8, 1.5, "cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    for actual, table in zip(found, expected):
        assert actual.dtype == torch.float32 and torch.equal(actual, table)


@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float64, 1e-6), (torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2),
])
def test_apply_rope_turns_adjacent_pairs(dtype: torch.dtype, tolerance: float):
    """Pairs (2i, 2i + 1), not the halves of the head; the dtype stays the input's."""
    x = torch.randn(2, 3, 5, 6, generator=seeded(0)).to(dtype)
    turned = octlm.apply_rope(x, *octlm.rope_tables(5, 6, 2.0, "cpu", base=50.0, start=4))
    assert turned.dtype == dtype and turned.shape == x.shape
    config = replace(SMALL, rope_base=50.0, rope_scale=2.0)
    for b, h, t in np.ndindex(2, 3, 5):
        expected = reference_rotate(x[b, h, t].double().numpy(), 4 + t, config)
        assert_near(turned[b, h, t], expected, tolerance)


@pytest.mark.parametrize("view", [
    lambda x: x[..., 1:7], lambda x: x[..., ::2][..., :6], lambda x: x.mT[..., :6],
    lambda x: x[:1, :1, :1, :6].expand(2, 3, 13, 6), lambda x: x.flatten()[1:7].view(1, 1, 1, 6),
], ids=["odd offset", "strided", "transposed", "expanded", "odd storage offset"])
def test_apply_rope_takes_any_layout(view: Callable):
    x = view(torch.randn(2, 3, 13, 13, generator=seeded(0)))
    tables = octlm.rope_tables(x.shape[2], 6, 1.0, "cpu")
    assert torch.equal(octlm.apply_rope(x, *tables), octlm.apply_rope(x.clone(), *tables))


@pytest.mark.parametrize("form", [
    {name: value} for name in ("rope_base", "rope_scale") for value in (10**20, 1e-35)], ids=str)
def test_rope_at_the_edges(form: dict):
    """Attention turns a query of NaN into zeros, which no finite check would see."""
    ids = random_ids(2, 12)
    logits = small_model(**form)(ids)
    assert logits.isfinite().all()
    assert_near(logits, small_model(**form, attention="manual")(ids), 2e-5)


# Linear ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("outputs", [1, 7, 12])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (0, 5), (1, 1, 5), (1, 2, 5), (2, 1, 5)],
                         ids=str)
def test_linear_layers(shape: tuple[int, ...], outputs: int, threads: int):
    """Values and gradients, for one row, cut into slices for the threads, and for more."""
    layer, x = octlm.Linear(5, outputs), torch.randn(shape, generator=seeded(0))
    assert layer.bias is None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = layer(x)
        found.sum().backward()
    finally:
        torch.set_num_threads(before)
    assert found.shape == (*shape[:-1], outputs)
    for position in np.ndindex(shape[:-1]):
        for output in range(outputs):
            expected = sum(x[position][i].item() * layer.weight[output, i].item() for i in range(5))
            assert abs(found[position][output].item() - expected) < 1e-6
    for output in range(outputs):
        assert_near(layer.weight.grad[output], x.double().reshape(-1, 5).numpy().sum(0), 1e-6)


class NoView(torch.Tensor):
    """A weight that is no ordinary tensor and, as quantized ones do, cannot be viewed."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.view:
            raise NotImplementedError("view")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("change", [
    lambda weight: weight.as_subclass(NoView), lambda weight: weight.t().contiguous().t(),
], ids=["subclass", "columns first"])
def test_linear_layers_take_any_weight(change: Callable):
    layer, x = octlm.Linear(6, 8), torch.randn(1, 1, 6, generator=seeded(0))
    expected = x @ layer.weight.detach().T
    layer.weight = torch.nn.Parameter(change(layer.weight.detach()), requires_grad=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_near(layer(x), expected, 1e-6)
    finally:
        torch.set_num_threads(before)


def test_linear_layers_refuse_another_width():
    with pytest.raises(RuntimeError):
        octlm.Linear(8, 6)(torch.ones(2, 4))


# Full pass ---------------------------------------------------------------------------------------


@over_attention
@pytest.mark.parametrize("form", FORMS + WINDOWS, ids=str)
def test_full_pass_equals_the_loops(form: dict, attention: str):
    model = small_model(**form, attention=attention)
    for length in (12, 5, 1):
        ids = random_ids(2, length)
        expected = np.array([reference_logits(model, row) for row in ids.tolist()])
        assert_near(model(ids), expected, 2e-5)


@over_attention
@pytest.mark.parametrize("window", [0, 1, 3])
def test_full_pass_is_causal(window: int, attention: str):
    """A token changes no earlier row, bit for bit, and every later one within reach."""
    model, ids = small_model(attention=attention, attention_window=window), random_ids(1, 12)
    before, reach = model(ids)[0], model.config.n_layers * (window - 1) if window else 12
    for j in range(12):
        changed = ids.clone()
        changed[0, j] = (changed[0, j] + 1) % 61
        moved = (model(changed)[0] - before).abs().amax(dim=1)
        for i in range(12):
            assert moved[i] > 1e-4 if j <= i <= j + reach else moved[i] == 0, (i, j)


@pytest.mark.parametrize("shape", [(5,), (1, 2, 3), (1, 0), (0, 4), ()], ids=str)
def test_both_passes_refuse_a_wrong_shape(shape: tuple[int, ...]):
    model = small_model()
    for call in (model, model.forward_cached):
        with pytest.raises(ValueError, match=r"^token IDs must have shape \[batch, nonempty sequ"):
            call(torch.zeros(shape, dtype=torch.long))


@over_positions
def test_full_pass_refuses_more_than_the_context(position: str):
    model = small_model(position=position)
    with pytest.raises(ValueError, match="context_length 12.* 13 positions"):
        model(random_ids(1, 13))


# Cached path -------------------------------------------------------------------------------------


@over_forms
def test_every_chunking_equals_the_full_pass(form: dict):
    """A wrong position, mask or head in any cached step; float64 leaves rounding no room."""
    model, ids = small_model(**form).double(), random_ids(2, 7)
    expected, cuts = model(ids), list(compositions(7))
    assert len(cuts) == 64
    for lengths in cuts:
        assert_near(in_chunks(model, ids, lengths), expected, 1e-12)


@over_forms
@pytest.mark.parametrize("lengths", [(12,), (3,) * 4, (1,) * 12, (5, 1, 6), (1, 11)], ids=str)
def test_chunks_in_float32_equal_full_pass_and_loops(form: dict, lengths: tuple[int, ...]):
    """The whole prompt, three tokens and one token a step, up to the last position."""
    model, ids = small_model(**form), random_ids(2, 12)
    logits = in_chunks(model, ids, lengths)
    assert_near(logits, model(ids), 2e-5)
    assert_near(logits[1], reference_logits(model, ids[1].tolist()), 2e-5)


def test_keys_are_saved_rotated():
    """Once, at their absolute position, so that a step need not turn them again."""
    model, ids, cache = small_model(n_layers=1), random_ids(1, 6), None
    for chunk in ids.split((3, 1, 2), dim=1):
        _, cache = model.forward_cached(chunk, cache)
    block = model.blocks[0]
    with torch.no_grad():
        key = block.attention.key(block.attention_norm(model.token_embedding(ids[0])))
    for i, head in np.ndindex(6, 2):
        unturned = key[i, head * 8 : head * 8 + 8].double().numpy()
        assert_near(cache[0][0][0, head, i], reference_rotate(unturned, i, model.config), 5e-6)


@pytest.mark.parametrize("saved", [0, 1, 5])
def test_cached_update_is_causal(saved: int):
    """A mask aligned to the upper left, or one place off, in an update of many tokens."""
    model, ids = small_model(), random_ids(1, 11)
    cache = model.forward_cached(ids[:, :saved])[1] if saved else None
    chunk = ids[:, saved:]
    before = model.forward_cached(chunk, cache)[0][0]
    for j in range(chunk.shape[1]):
        changed = chunk.clone()
        changed[0, j] = (changed[0, j] + 1) % 61
        moved = (model.forward_cached(changed, cache)[0][0] - before).abs().amax(dim=1)
        assert (moved[:j] == 0).all() and (moved[j:] > 1e-4).all(), j


@over_positions
def test_the_cache_is_a_value(position: str):
    """One prefix continued in three ways: nothing passed in changes, nothing returned is shared."""
    model, prefix = small_model(position=position), random_ids(2, 4)
    _, cache = model.forward_cached(prefix)
    entries, copies = list(cache), [tensor.clone() for tensor in tensors_of(cache)]
    for seed, lengths in ((2, (5,)), (3, (1, 1, 3)), (4, (2, 3))):
        more, longer, rows = random_ids(2, 5, seed), cache, []
        for chunk in more.split(lengths, dim=1):
            logits, longer = model.forward_cached(chunk, longer)
            rows.append(logits)
        expected = model(torch.cat((prefix, more), dim=1))[:, 4:]
        assert_near(torch.cat(rows, dim=1), expected, 2e-5)
        assert storages_of(longer).keys().isdisjoint(storages_of(cache))
        assert len(cache) == len(entries) and all(a is b for a, b in zip(cache, entries))
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(cache), copies))


@pytest.mark.parametrize("form, training, text", [
    ({}, True, "cached forward requires eval mode"),
    ({"attention": "manual"}, False, "cached forward requires full SDPA attention"),
    ({"attention_window": 12}, False, "cached forward requires full SDPA attention"),
    (WINDOWS[4], False, "cached forward requires full SDPA attention"),
])
def test_cached_forward_refuses_the_wrong_mode(form: dict, training: bool, text: str):
    with pytest.raises(ValueError, match=f"^{text}"):
        small_model(**form).train(training).forward_cached(random_ids(1, 3))


@over_positions
@pytest.mark.parametrize("lengths", [(13,), (12, 1), (11, 2), (4, 9)], ids=str)
def test_cached_forward_refuses_more_than_the_context(lengths: tuple[int, ...], position: str):
    """A slice past the end of a table is silent, and so is a write past the end of a buffer."""
    model = small_model(position=position)
    with pytest.raises(ValueError, match="^cached sequence exceeds context_length"):
        in_chunks(model, random_ids(2, 13), lengths)


def test_cache_must_have_one_entry_per_layer():
    model = small_model()
    _, cache = model.forward_cached(random_ids(1, 3))
    for wrong in ([], cache[:1], cache + cache[:1], [cache[0], cache[1][:1]], [None, None],
                  [cache[0], (None, None)], [1, 2], (pair for pair in cache), torch.zeros(2), 3):
        with pytest.raises(ValueError, match="^cache must have one entry per layer"):
            model.forward_cached(random_ids(1, 1), wrong)


def of_layer_1(change: Callable[[Tensor], Tensor]) -> Callable:
    return lambda cache: [cache[0], tuple(map(change, cache[1]))]


MISFITS = {  # what is done to a cache of 2 sequences, 2 heads, 4 positions; given; expected
    "batch": (lambda c: [(k[:1], v[:1]) for k, v in c], "(1, 2, 4, 8)", "(2, 2, 4, 8)"),
    "batch of a layer": (of_layer_1(lambda t: t[:1]), "(1, 2, 4, 8)", "(2, 2, 4, 8)"),
    "one head": (of_layer_1(lambda t: t[:, :1]), "(2, 1, 4, 8)", "(2, 2, 4, 8)"),
    "all heads": (of_layer_1(lambda t: t.repeat(1, 4, 1, 1)), "(2, 8, 4, 8)", "(2, 2, 4, 8)"),
    "head size": (of_layer_1(lambda t: t[..., :4]), "(2, 2, 4, 4)", "(2, 2, 4, 8)"),
    "dimensions": (of_layer_1(lambda t: t[0]), "(2, 4, 8)", "(2, 2, 4, 8)"),
    "short layer": (of_layer_1(lambda t: t[:, :, 1:]), "(2, 2, 3, 8)", "(2, 2, 4, 8)"),
    "short key": (lambda c: [(k[:, :, 1:], v) for k, v in c], "(2, 2, 4, 8)", "(2, 2, 3, 8)"),
    "short value": (lambda c: [(k, v[:, :, 1:]) for k, v in c], "(2, 2, 3, 8)", "(2, 2, 4, 8)"),
    "device": (of_layer_1(lambda t: t.to("meta")), "meta", "cpu"),
    "half": (of_layer_1(lambda t: t.half()), "torch.float16", "torch.float32"),
    "double value": (lambda c: [(k, v.double()) for k, v in c], "torch.float64", "torch.float32"),
}


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("change, given, expected", MISFITS.values(), ids=MISFITS)
def test_cache_that_does_not_fit(change: Callable, given: str, expected: str, new: int):
    """It is never broadcast, promoted or truncated, and the message names both sides."""
    model = small_model()
    cache = change(model.forward_cached(random_ids(2, 4))[1])
    with pytest.raises(ValueError, match=r"^cache .*must be .*, got ") as error:
        model.forward_cached(random_ids(2, new), cache)
    wanted, _, found = str(error.value).partition("got ")
    assert given in found and expected in wanted


def test_cache_must_have_the_dtype_of_the_new_keys():
    """Which under autocast is not the weights'."""
    model, ids = small_model(), random_ids(1, 5)
    _, cache = model.forward_cached(ids[:, :4])
    with torch.autocast("cpu", torch.bfloat16):
        _, longer = model.forward_cached(ids[:, 4:], model.forward_cached(ids[:, :4])[1])
        assert {tensor.dtype for tensor in tensors_of(longer)} == {torch.bfloat16}
        with pytest.raises(ValueError, match="must be torch.bfloat16, got torch.float32"):
            model.forward_cached(ids[:, 4:], cache)


# Weights and dropout -----------------------------------------------------------------------------


@over_positions
@pytest.mark.parametrize("change", ["in place", "load_state_dict", "half", "double"])
def test_changed_weights_take_effect_at_the_next_call(change: str, position: str):
    model, ids = small_model(position=position), random_ids(2, 6)

    def everything(model: Decoder) -> list[Tensor]:
        return [model(ids), in_chunks(model, ids, (3, 1, 2)), model.generate(ids, 3),
                model.generate_cached(ids, 3)]

    before = everything(model)
    if change == "in place":
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5).add_(0.01)
    elif change == "load_state_dict":
        model.load_state_dict(small_model(seed=9, position=position).state_dict())
    else:
        model.to(torch.float16 if change == "half" else torch.float64)
    fresh = Decoder(model.config).to(model.lm_head.weight.dtype).eval()
    fresh.load_state_dict(model.state_dict())
    after = everything(model)
    assert not torch.equal(after[0], before[0].to(after[0].dtype))
    for actual, expected in zip(after, everything(fresh)):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


@pytest.mark.parametrize("form", [{}, {"position": "learned", "attention": "manual"}], ids=str)
def test_training_after_inference_equals_training_without(form: dict):
    """An inference tensor kept from an evaluation would break or change the backward pass."""
    gradients, ids = [], random_ids(2, 8)
    for evaluated in (False, True):
        model = small_model(dropout=0.2, **form)
        if evaluated:
            model.generate(ids, 3)
            if model.config.attention == "sdpa":
                model.generate_cached(ids, 6)
                in_chunks(model, ids, (5, 3))
        torch.manual_seed(5)
        logits = model.train()(ids)[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.isfinite().all() and gradient.abs().max() > 0, name
        assert torch.equal(gradient, gradients[1][name]), name


@over_attention
def test_dropout_in_training_only(attention: str):
    model, plain = small_model(dropout=0.5, attention=attention), small_model(attention=attention)
    ids, x = random_ids(1, 8), torch.randn(1, 8, 64, generator=seeded(0))
    layer, rope = model.blocks[0].attention, octlm.rope_tables(8, 8, 1.0, "cpu")
    assert torch.equal(model(ids), plain(ids)) and torch.equal(layer(x, rope), layer(x, rope))
    model.train()
    assert not torch.equal(model(ids), model(ids))
    assert not torch.equal(layer(x, rope), layer(x, rope))  # on the attention weights, too


PLACES = [  # the calls of dropout in their order, and the weight whose zeros have the same effect
    "token_embedding", *(f"blocks.{layer}.{name}" for layer in range(2) for name in (
        "attention.value", "attention.output", "feed_forward.down")),
]


@pytest.mark.parametrize("place", range(7), ids=PLACES)
def test_dropout_in_each_place(place: int, monkeypatch):
    """To drop all of one branch is to take that branch out, and nothing else."""
    model, ids, seen = small_model(attention="manual", dropout=0.3).train(), random_ids(2, 5), []

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        assert p == 0.3 and training
        seen.append(tuple(x.shape))
        return x * 0 if len(seen) == place + 1 else x

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", dropout)
        logits = model(ids)
    assert seen == [(2, 5, 64), *[(2, 8, 5, 5), (2, 5, 64), (2, 5, 64)] * 2]
    if place == 0:
        assert (logits == 0).all()
    else:
        model.get_parameter(f"{PLACES[place]}.weight").data.zero_()
        assert_near(logits, model.eval()(ids), 2e-5)


@pytest.mark.parametrize("training", [True, False])
def test_sdpa_is_given_the_dropout_in_training(training: bool, monkeypatch):
    given, right = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention",
        lambda q, k, v, mask, p, is_causal: given.append(p) or right(
            q, k, v, mask, 0.0, is_causal=is_causal))
    small_model(dropout=0.3).train(training)(random_ids(1, 4))
    assert given == [0.3 if training else 0.0] * 2


def test_learned_positions_are_drawn():
    torch.manual_seed(0)
    config = replace(SMALL, position="learned", context_length=500)
    weight = Decoder(config).position_embedding.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.02) and weight.requires_grad


def test_the_cached_pass_gives_inference_tensors():
    logits, cache = small_model().forward_cached(random_ids(1, 3))
    assert all(tensor.is_inference() for tensor in (logits, *tensors_of(cache)))


# Generators --------------------------------------------------------------------------------------


def by_hand(model: Decoder, ids: Tensor, count: int, **sampling) -> Tensor:
    """Generation as a loop over the full pass, and nothing else."""
    for _ in range(count):
        logits = model(ids[:, -model.config.context_length :])[:, -1].detach()
        if sampling:
            token = octlm.sample(logits, **sampling)
        else:
            best = [max(range(len(row)), key=row.__getitem__) for row in logits.tolist()]
            token = torch.tensor(best)[:, None]
        ids = torch.cat((ids, token), dim=1)
    return ids


@over_forms
@pytest.mark.parametrize("length", [3, 8, 11])
def test_generators_agree_across_the_context(form: dict, length: int):
    """12 new tokens, context 8; prompts shorter than the context, as long, and longer."""
    model, prompt = small_model(**form, context_length=8), random_ids(3, length)
    greedy = torch.cat([by_hand(model, row, 12) for row in prompt.split(1)])  # one row at a time
    assert torch.equal(greedy[:, :length], prompt) and greedy.shape == (3, length + 12)
    assert greedy[:, length:].unique().numel() >= 6  # a model stuck on one token shows nothing
    for generate in (model.generate, model.generate_cached):
        assert torch.equal(generate(prompt, 12), greedy)
        for sampling in ({"temperature": 0.9}, SAMPLED):
            expected = by_hand(model, prompt, 12, **sampling, generator=seeded(7))
            assert torch.equal(generate(prompt, 12, **sampling, generator=seeded(7)), expected)


@over_attention
@pytest.mark.parametrize("form", [{"attention_window": 8}, *WINDOWS[3:7], *WINDOWS[9:]], ids=str)
def test_naive_generator_takes_every_attention_form(form: dict, attention: str):
    model, prompt = small_model(**form, context_length=8, attention=attention), random_ids(2, 5)
    assert torch.equal(model.generate(prompt, 6), by_hand(model, prompt, 6))
    with pytest.raises(ValueError, match="^cached forward requires full SDPA attention"):
        model.generate_cached(prompt, 6)


@pytest.mark.parametrize("name", ["generate", "generate_cached"])
@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_the_result_is_an_ordinary_tensor(name: str, count: int, dtype, mode: Callable):
    """int64 that autograd accepts, whatever the caller's mode; the prompt is left alone."""
    model = small_model()
    with mode():
        prompt = random_ids(2, 4).to(dtype)
        found = getattr(model, name)(prompt, count)
    assert found.dtype == torch.int64 and found.shape == (2, 4 + count)
    assert torch.equal(found[:, :4], prompt) and not found.is_inference()
    model(found).sum().backward()
    assert model.token_embedding.weight.grad.isfinite().all()
    found.zero_()  # writing to the result does not reach the prompt
    assert torch.equal(prompt, random_ids(2, 4))


@pytest.mark.parametrize("name, length, expected", [
    ("generate_cached", 3, [3, 1, 1, 1, 1, 1]),
    ("generate_cached", 5, [5, 1, 1, 1, 8, 8]),
    ("generate_cached", 9, [8, 8, 8, 8, 8, 8]),
    ("generate", 3, [3, 4, 5, 6, 7, 8]),
    ("generate", 6, [6, 7, 8, 8, 8, 8]),
])
def test_what_a_generator_computes(name: str, length: int, expected: list[int]):
    """n new tokens cost one prompt pass and n - 1 steps; both project one position a pass."""
    model, passes, projected = small_model(context_length=8), [], []
    for block in model.blocks:
        block.attention.key.register_forward_hook(lambda _, x, y: passes.append(x[0].shape[1]))
    model.lm_head.register_forward_hook(lambda _, x, y: projected.append(x[0].numel() // 128))
    getattr(model, name)(random_ids(2, length), 6)
    assert passes == [positions for positions in expected for _ in model.blocks]
    assert projected == [1] * 6


@over_paths
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=str)
def test_stream_equals_generate(cached: bool, sampling: dict):
    model, prompt = small_model(context_length=8), random_ids(3, 4)
    expected = model.generate(prompt, 9, **sampling, generator=seeded(3))
    tokens = list(model.stream(prompt, 9, cached, **sampling, generator=seeded(3)))
    assert all(token.shape == (3, 1) and token.dtype == torch.int64 for token in tokens)
    assert torch.equal(torch.cat((prompt, *tokens), dim=1), expected)
    assert list(model.stream(prompt, 0, cached)) == []


@over_paths
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_stream_leaves_the_callers_mode_alone(cached: bool, mode: Callable):
    """Between the yields, after the stream was abandoned, and when it goes on in another mode."""

    def modes() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    model, outside = small_model(), modes()
    with mode():
        inside, stream = modes(), model.stream(random_ids(1, 3), 6, cached)
        for _, token in zip(range(2), stream):
            assert modes() == inside and not token.is_inference()
    assert modes() == outside
    token = next(stream)
    assert modes() == outside
    model(token).sum().backward()
    stream.close()
    next(model.stream(random_ids(1, 3), 6, cached))  # abandoned and collected
    assert modes() == outside


BAD_CALLS = [
    ({"token_ids": torch.zeros(1, 0, dtype=torch.long)}, "token IDs must have shape"),
    ({"token_ids": torch.zeros(3, dtype=torch.long)}, "token IDs must have shape"),
    ({"token_ids": torch.zeros(1, 3)}, "token IDs must be .*int64"),
    ({"token_ids": torch.tensor([[3, -1, 5]])}, "token IDs must be .*60, got -1"),
    ({"token_ids": torch.tensor([[3, 61, 5]])}, "token IDs must be .*60, got .*61"),
    ({"token_ids": torch.tensor([[3, 4], [3, 61]])}, "token IDs must be .*60, got .*61"),
    ({"token_ids": torch.tensor([[-1] + [3] * 13])}, "token IDs must be .*60, got -1"),  # cropped
    ({"token_ids": torch.zeros(1, 3, dtype=torch.long, device="meta")}, "token IDs must be on cpu"),
    *(({"max_new_tokens": value}, "max_new_tokens must be") for value in (-1, 2.0, True)),
    *(({"temperature": value}, "temperature must be")
      for value in (-0.5, math.nan, math.inf, -math.inf, "1", None, True)),
    *(({"top_k": value}, "top_k must be") for value in (0, -3, 1.5, True)),
    ({"generator": MagicMock(torch.Generator, device=torch.device("meta"))},
     "generator must be on cpu, got meta"),
    ({"generator": torch.zeros(1)}, "generator must be on cpu, got tensor"),
    ({"training": True}, ".*requires eval mode"),
]


@pytest.mark.parametrize("changes, text", BAD_CALLS, ids=str)
@pytest.mark.parametrize("name", ["generate", "generate_cached", "stream"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_arguments_are_checked_at_the_call(name: str, changes: dict, text: str, temperature: float):
    """Before any work, in a stream before the first `next`, and where they would not matter."""
    changes, calls = dict(changes), []
    model = small_model().train(changes.pop("training", False))
    model.final_norm.register_forward_hook(lambda *_: calls.append(1))
    arguments = {"token_ids": random_ids(1, 3), "max_new_tokens": 4, "temperature": temperature}
    with pytest.raises(ValueError, match=f"^{text}"):
        getattr(model, name)(**arguments | changes)
    assert not calls


@pytest.mark.parametrize("form", [{"attention": "manual"}, {"attention_window": 12}], ids=str)
@pytest.mark.parametrize("name", ["generate_cached", "stream"])
def test_attention_without_a_cache_is_refused_at_the_call(name: str, form: dict):
    """Before the first `next`, and where no token is asked for."""
    with pytest.raises(ValueError, match="^cached forward requires full SDPA attention"):
        getattr(small_model(**form), name)(random_ids(1, 3), 0)


@pytest.mark.parametrize("name", ["generate", "generate_cached"])
def test_logits_beyond_float16_raise(name: str):
    model = small_model().half()
    model.final_norm.weight.data.fill_(3e4)
    with pytest.raises(RuntimeError, match="not finite"):
        getattr(model, name)(random_ids(1, 3), 2)


@over_paths
def test_training_mode_between_two_yields(cached: bool):
    """Dropout would change the tokens of a stream without a word."""
    model = small_model(dropout=0.5)
    stream = model.stream(random_ids(1, 3), 4, cached)
    next(stream)
    model.train()
    with pytest.raises(ValueError, match="requires eval mode"):
        next(stream)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", [
    "token_embedding", "final_norm", "blocks.1.attention_norm", "blocks.1.attention.value",
    "blocks.0.attention.output", "blocks.1.feed_forward.gate", "blocks.0.feed_forward.up",
    "blocks.0.feed_forward.down",
])
def test_weights_that_are_not_finite_raise(name: str, value: float, sampling: dict):
    """The argmax of NaN is an index like any other: a broken model would say token 0 for ever."""
    model, prompt = small_model(), torch.tensor([[5, 6, 7]])
    with torch.no_grad():  # in the embedding, this is a token that is not in the prompt
        model.get_submodule(name).weight.view(-1)[3] = value
    for call in (
        lambda: model.generate(prompt, 4, **sampling),
        lambda: model.generate_cached(prompt, 4, **sampling),
        lambda: next(model.stream(prompt, 4, True, **sampling)),
        lambda: next(model.stream(prompt, 4, False, **sampling)),
    ):
        with pytest.raises(RuntimeError, match="not finite"):
            call()


@over_paths
def test_stream_stops_at_the_first_logits_that_are_not_finite(cached: bool):
    """Position 5 is broken: after a prompt of three, three tokens are good, and no more."""
    model, prompt = small_model(position="learned"), random_ids(1, 3)
    expected = model.generate(prompt, 3)[0, 3:].tolist()
    with torch.no_grad():
        model.position_embedding.weight[5, 0] = math.nan
    stream = model.stream(prompt, 6, cached)
    assert [next(stream).item() for _ in range(3)] == expected
    with pytest.raises(RuntimeError, match="not finite"):
        next(stream)


@over_paths
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_stream_refuses_logits_of_any_row(cached: bool, value: float):
    """-inf as well: in a model's own logits it is no ban but a fault."""

    def spoil(head: octlm.Linear, inputs: tuple, logits: Tensor) -> None:
        logits[1, -1, 3] = value

    model = small_model()
    model.lm_head.register_forward_hook(spoil)
    with pytest.raises(RuntimeError, match="logits are not finite"):
        next(model.stream(random_ids(2, 4), 1, cached))


@pytest.mark.parametrize("name", ["generate", "generate_cached"])
def test_the_last_position_alone_meets_the_vocabulary(name: str):
    """In the prompt's pass, in every step, and past the context: neither path projects more."""
    model, rows = small_model(), []
    model.lm_head.register_forward_hook(lambda head, inputs, _: rows.append(inputs[0].shape[:2]))
    getattr(model, name)(random_ids(2, 9), 6)
    assert rows == [(2, 1)] * 6
    model.forward_cached(random_ids(2, 9))
    assert rows[6:] == [(2, 9)]


@pytest.mark.parametrize("ids", [[[1, 2]], (1, 2), None, "12", np.ones((1, 2), np.int64)], ids=str)
def test_token_ids_must_be_a_tensor(ids: object):
    model = small_model()
    for call in (model, model.forward_cached, lambda ids: model.generate(ids, 0),
                 lambda ids: model.stream(ids, 1)):
        with pytest.raises(ValueError, match="^token IDs must have shape .*, got "):
            call(ids)


# Sampling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature, top_k",
                         [(1.0, None), (0.5, None), (2.0, None), (0.7, 5), (1.5, 1), (1.0, 11)])
def test_sample_draws_from_the_softmax(temperature: float, top_k: int | None):
    """20,000 draws against a softmax by hand: chi-square with at most 11 degrees of freedom."""
    logits = torch.randn(12, generator=seeded(0)) * 1.5
    drawn = octlm.sample(logits.expand(20_000, -1), temperature, top_k, seeded(1))
    assert drawn.shape == (20_000, 1) and drawn.dtype == torch.int64
    counts = torch.bincount(drawn[:, 0], minlength=12).tolist()
    kept = sorted(range(12), key=lambda i: -logits[i].item())[: top_k or 12]
    shares = {i: math.exp(logits[i].item() / temperature) for i in kept}
    expected = {i: 20_000 * share / sum(shares.values()) for i, share in shares.items()}
    assert sum(counts[i] for i in kept) == 20_000
    distance = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in kept)
    assert distance < 24.7  # a right sampler stays below for 99 of 100 seeds


def test_greedy_takes_the_lowest_index_among_equals():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0], [4.0, 4.0, 4.0, 4.0, 4.0]])
    assert octlm.sample(logits).tolist() == [[1], [0]]
    assert octlm.sample(logits.repeat(1, 500)).tolist() == [[1], [0]]


@pytest.mark.parametrize("row, top_k, kept", [
    ([1.0, 3.0, 3.0, 2.0, 3.0, 3.0], 2, {1, 2}),
    ([1.0, 2.0, 3.0, 2.0, 2.0, 0.0], 3, {1, 2, 3}),
    ([0.0] * 300, 5, {0, 1, 2, 3, 4}),
])
def test_top_k_keeps_exactly_k_lowest_index_first(row: list[float], top_k: int, kept: set[int]):
    logits = torch.tensor(row).expand(2000, -1)
    assert set(octlm.sample(logits, 5.0, top_k, seeded(0))[:, 0].tolist()) == kept


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 3}])
def test_a_banned_token_is_never_drawn(sampling: dict):
    """-inf bans a token, also when fewer than top_k are left; the others keep their shares."""
    logits = torch.tensor([[9.0, 1.0, 0.0, -math.inf], [-math.inf, -math.inf, 2.0, -math.inf]])
    logits[0, 0] = -math.inf
    drawn = torch.cat([octlm.sample(logits, generator=seeded(seed), **sampling)
                       for seed in range(300)], dim=1)
    assert set(drawn[0].tolist()) == ({1, 2} if sampling else {1}) and (drawn[1] == 2).all()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 2}])
@pytest.mark.parametrize("wrong", [
    [0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3, [math.nan, -math.inf, -math.inf],
], ids=str)
def test_sample_refuses_a_row_without_a_choice(wrong: list[float], sampling: dict):
    for rows in ([wrong], [[0.0, 1.0, 2.0], wrong]):  # not in the first row alone
        with pytest.raises(RuntimeError, match="finite"):
            octlm.sample(torch.tensor(rows), **sampling)


@pytest.mark.parametrize("wrong", [
    {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": "1"}, {"temperature": None},
    {"temperature": True}, {"top_k": 0}, {"top_k": True}, {"top_k": 2.0}, {"generator": 3},
    {"generator": "cpu"},
], ids=str)
def test_sample_and_stream_refuse_the_same_arguments(wrong: dict):
    for call in (lambda: octlm.sample(torch.zeros(1, 5), **wrong),
                 lambda: small_model().stream(random_ids(1, 3), 1, **wrong)):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be "):
            call()


def test_a_small_temperature_is_not_rounded():
    """At 1e-3 a logit that is larger by 0.01 is e ** 10 times as likely; by 0.0005, 1.65 times."""
    clear, close = torch.tensor([[0.0, 0.01]] * 500), torch.tensor([[0.0, 0.0005]] * 4000)
    assert (octlm.sample(clear, 1e-3, generator=seeded(0)) == 1).all()
    share = octlm.sample(close, 1e-3, generator=seeded(0)).float().mean().item()
    assert share == pytest.approx(1 / (1 + math.exp(-0.5)), abs=0.03)


def test_top_k_over_the_vocabulary_keeps_all():
    logits = torch.randn(500, 30, generator=seeded(0))
    expected = octlm.sample(logits, 1.3, None, seeded(4))
    assert expected.unique().numel() > 20
    for top_k in (30, 31, 10**6):
        assert torch.equal(octlm.sample(logits, 1.3, top_k, seeded(4)), expected)


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-46, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float, top_k: int | None):
    """Division by it overflows float32."""
    logits = torch.randn(200, 30, generator=seeded(0)) * 50
    logits[0, 0], logits[1, 7] = 3e38, -3e38
    found = octlm.sample(logits, temperature, top_k, seeded(1))
    assert torch.equal(found, logits.argmax(dim=-1, keepdim=True))


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("temperature", [1e10, 1e38, 1e300])
def test_a_huge_temperature_is_uniform(temperature: float, top_k: int | None):
    """Over all that top_k keeps, and no others; the hugest is beyond float32."""
    logits = torch.randn(8, generator=seeded(0)) * 50
    drawn = octlm.sample(logits.expand(8000, -1), temperature, top_k, seeded(1))[:, 0]
    kept = logits.topk(top_k or 8).indices
    counts = torch.bincount(drawn, minlength=8)[kept]
    assert counts.sum() == 8000 and (counts - 8000 / len(kept)).abs().max() < 170  # 4 deviations


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sample_works_in_float32(dtype: torch.dtype):
    logits = (torch.randn(300, 40, generator=seeded(0)) * 3).to(dtype)
    expected = octlm.sample(logits.float(), 0.8, 9, seeded(2))
    assert torch.equal(octlm.sample(logits, 0.8, 9, seeded(2)), expected)
    with pytest.raises(RuntimeError, match="finite largest value"):
        octlm.sample(torch.tensor([[1e300, 2e300]], dtype=torch.float64))


@over_paths
def test_seeds_decide_and_the_global_state_rests(cached: bool):
    model, prompt = small_model(), random_ids(1, 3)
    generate = model.generate_cached if cached else model.generate
    torch.manual_seed(11)
    state = torch.get_rng_state()
    a, again, b = (generate(prompt, 9, **SAMPLED, generator=seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, again) and not torch.equal(a, b)
    generate(prompt, 9)  # nor does greedy decoding move it
    assert torch.equal(torch.get_rng_state(), state)
    first = generate(prompt, 9, **SAMPLED)
    torch.manual_seed(11)
    assert torch.equal(generate(prompt, 9, **SAMPLED), first)


# Modes a caller may be in ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["generate", "generate_cached"])
@pytest.mark.parametrize("way", [
    torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(True),
    "deepcopy", "pickle", "compile", "module.compile", "threads", "abandoned stream",
], ids=lambda way: way if isinstance(way, str) else None)
def test_the_callers_mode_changes_no_token(way: str | Callable, name: str):
    model, prompt = small_model(context_length=8), random_ids(2, 5)
    expected, found = model.generate(prompt, 9), []
    if callable(way):
        with way():
            found.append(getattr(model, name)(prompt, 9))
    elif way == "threads":
        with ThreadPoolExecutor(4) as pool:
            found += pool.map(lambda _: getattr(model, name)(prompt, 9), range(8))
    elif way == "abandoned stream":
        stream = model.stream(prompt, 9, cached=name == "generate_cached")
        next(stream)
        found.append(getattr(model, name)(prompt, 9))  # while the first stream is still open
        found.append(torch.cat((expected[:, :6], *stream), dim=1))
    else:
        if way == "module.compile":
            model.compile(backend="eager")
        model = {
            "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)),
            "compile": lambda m: torch.compile(m, backend="eager"), "module.compile": lambda m: m,
        }[way](model)
        found.append(getattr(model, name)(prompt, 9))
        assert_near(model(prompt), small_model(context_length=8)(prompt), 1e-5)
    assert all(torch.equal(tokens, expected) for tokens in found)


@over_positions
def test_autocast_moves_the_logits_of_both_paths_alike(position: str):
    model, ids = small_model(position=position), random_ids(2, 12)
    exact = model(ids).detach()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        full, cached = model(ids), in_chunks(model, ids, (5, 1, 3, 1, 2))
        assert model.generate_cached(ids, 4).shape == model.generate(ids, 4).shape == (2, 16)
    assert full.dtype == cached.dtype == torch.bfloat16
    bound = 0.1 * exact.abs().max().item()
    assert_near(full.float(), exact, bound)
    assert_near(cached.float(), exact, bound)


# Edges -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [
    {"context_length": 1}, {"n_layers": 1}, {"n_heads": 1, "n_kv_heads": 1},
    {"n_heads": 8, "n_kv_heads": 8}, {"n_heads": 32, "n_kv_heads": 1},  # head size 2
    {"n_heads": 64, "n_kv_heads": 2, "position": "learned"},  # head size 1
], ids=str)
def test_small_edges(form: dict):
    """Batch 7, a prompt that is not contiguous, of context - 1, context and context + 1 tokens."""
    model = small_model(**form)
    context = model.config.context_length
    for length in range(max(context - 1, 1), context + 2):
        prompt = random_ids(length, 7).T
        expected = by_hand(model, prompt, 3)
        assert torch.equal(model.generate(prompt, 3), expected)
        assert torch.equal(model.generate_cached(prompt, 3), expected)
    ids = random_ids(7, context)
    expected = [reference_logits(model, row) for row in ids[::3].tolist()]
    assert_near(in_chunks(model, ids, (1,) * context)[::3], np.array(expected), 2e-5)


@over_positions
@pytest.mark.parametrize("new", [1, 2, 3])
def test_the_last_position_and_one_over(new: int, position: str):
    model, ids = small_model(position=position), random_ids(1, 13)
    _, cache = model.forward_cached(ids[:, : 12 - new])
    logits, _ = model.forward_cached(ids[:, 12 - new : 12], cache)
    assert_near(logits, model(ids[:, :12])[:, -new:], 2e-5)
    with pytest.raises(ValueError, match="^cached sequence exceeds context_length"):
        model.forward_cached(ids[:, 12 - new :], cache)


# Compile and memory ------------------------------------------------------------------------------


@over_paths
def test_a_stream_and_its_prompt_share_no_memory(cached: bool):
    model, prompt = small_model(), random_ids(1, 4)
    expected = [token.item() for token in model.stream(prompt, 5, cached)]
    stream = model.stream(prompt, 5, cached)
    prompt.zero_()
    assert [token.item() for token in stream] == expected


def test_a_stream_of_millions_holds_the_context_alone():
    model = small_model(context_length=8)
    stream = model.stream(random_ids(1, 3), 10**12)
    for _ in range(200):
        next(stream)
    token_ids = stream.gi_frame.f_locals["token_ids"]
    assert token_ids.shape == (1, 8) and token_ids.untyped_storage().nbytes() <= 9 * 8


def test_both_passes_compile():
    """Each as one graph, as `torch.compile` with `fullgraph=True` demands."""
    model, ids = small_model(), random_ids(1, 4)
    expected = model(ids)
    assert_near(torch.compile(model, backend="eager", fullgraph=True)(ids), expected, 2e-5)
    step = torch.compile(model.forward_cached, backend="eager", fullgraph=True)
    first, cache = step(ids[:, :3])
    last, _ = step(ids[:, 3:], cache)
    assert_near(torch.cat((first, last), dim=1), expected, 2e-5)


def test_importing_and_loading_are_silent(tmp_path: Path):
    """And leave PyTorch's compiler out, whose import takes a second."""
    code = "import sys, octlm, day5; octlm.load_checkpoint(day5.CHECKPOINTS / 'octlm-26m.pt'); "
    code += "sys.exit('torch._dynamo' in sys.modules)"
    command = [sys.executable, "-W", "always", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# Bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length, kib", [(0, 0), (1, 4), (64, 256), (256, 1024), (512, 2048)])
def test_kv_cache_bytes_of_the_default_model(length: int, kib: int):
    assert octlm.kv_cache_bytes(DecoderConfig(vocab_size=8192), length, 2) == kib * 1024


@pytest.mark.parametrize("form", FORMS[:8], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_held_are_the_formula(form: dict, batch: int, dtype: torch.dtype):
    """By shape and by storage: a view of a larger tensor holds more than it shows."""
    model, cache, length = small_model(**form).to(dtype), None, 0
    for chunk in random_ids(batch, 12).split((4, 1, 1, 3, 1, 2), dim=1):
        _, cache = model.forward_cached(chunk, cache)
        length += chunk.shape[1]
        expected = 2 * 2 * form["n_kv_heads"] * 8 * length * dtype.itemsize * batch
        assert octlm.kv_cache_bytes(model.config, length, dtype.itemsize) * batch == expected
        assert sum(t.numel() * t.element_size() for t in tensors_of(cache)) == expected
        assert sum(storages_of(cache).values()) == expected and len(storages_of(cache)) == 4


# Checkpoint files --------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "small.pt", small_model())
    return tmp_path / "small.pt"


def content_of(path: Path) -> dict:
    return torch.load(path, weights_only=True)


@over_positions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_checkpoint_round_trip(dtype: torch.dtype, position: str, tmp_path: Path):
    """Bit for bit, in eval mode, the head tied; no file left over, no random number drawn."""
    facts = {"tokens": 12, "files": {"é": [1, 2.5, None]}}
    model = small_model(position=position, dropout=0.1, rope_base=77.0).to(dtype).train()
    path, state = tmp_path / "a.pt", torch.get_rng_state()
    save_checkpoint(path, model, **facts)
    loaded = load_checkpoint(str(path))
    assert torch.equal(torch.get_rng_state(), state) and os.listdir(tmp_path) == ["a.pt"]
    weights = dict(model.named_parameters())
    content = content_of(path)
    assert content["weights"].keys() == weights.keys() and "lm_head.weight" not in weights
    stored = content.pop("weights").values()
    assert {weight.dtype for weight in (*stored, *weights.values())} == {dtype}
    assert content == {"format": 1, "config": asdict(model.config), "facts": facts}
    assert loaded.config == model.config and not any(m.training for m in loaded.modules())
    assert loaded.lm_head.weight is loaded.token_embedding.weight
    assert_same_weights(loaded, model.float())
    assert torch.equal(loaded(random_ids(1, 5)), model.eval()(random_ids(1, 5)))
    loaded(random_ids(1, 5)).sum().backward()


def test_a_checkpoint_from_cuda_loads_on_the_cpu(saved: Path):
    """Its storages are marked cuda:0; torch.load alone would refuse them here."""
    with zipfile.ZipFile(saved) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(saved, "w") as file:
        for name, data in entries.items():
            if name.endswith("data.pkl"):
                marked = data.replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
                assert marked != data
                data = marked
            file.writestr(name, data)
    assert_same_weights(load_checkpoint(saved), small_model())


def test_load_takes_a_device(saved: Path):
    assert load_checkpoint(saved, device="meta").lm_head.weight.is_meta
    assert load_checkpoint(saved, torch.device("cpu")).lm_head.weight.is_cpu


def test_facts_come_back(tmp_path: Path):
    """Any name is a fact's, also that of a parameter; a damaged file yields no facts."""
    facts = {"path": "a", "model": [1, {"é": None}], "seconds": 2.5}
    save_checkpoint(tmp_path / "a.pt", small_model(), **facts)
    assert octlm.load_facts(tmp_path / "a.pt") == facts
    (tmp_path / "a.pt").write_bytes(flipped((tmp_path / "a.pt").read_bytes()))
    with pytest.raises(ValueError, match="a.pt: .*CRC"):
        octlm.load_facts(tmp_path / "a.pt")


def test_a_model_loaded_in_inference_mode_is_an_ordinary_one(saved: Path):
    with torch.inference_mode():
        model = load_checkpoint(saved)
    assert not any(weight.is_inference() for weight in model.parameters())
    model(random_ids(1, 5)).sum().backward()
    assert model.half().token_embedding.weight.dtype == torch.float16


SHARED = torch.ones(10_000)  # holds each weight, but not all of them


@pytest.mark.parametrize("spread", [
    lambda weights: weights | {QUERY: torch.ones(1).expand(64, 64)},
    lambda weights: weights | {QUERY: weights["token_embedding.weight"][0].expand(64, 64)},
    lambda weights: {name: torch.ones(128).as_strided(weight.shape, [1] * weight.ndim)
                     for name, weight in weights.items()},
    lambda weights: {name: SHARED[: weight.numel()].view(weight.shape)
                     for name, weight in weights.items()},
], ids=["one number", "one row", "all", "shared"])
def test_a_weight_that_is_not_in_the_file_in_full(spread: Callable, saved: Path):
    """A few numbers spread by strides would load as a large model."""
    content = content_of(saved)
    content["weights"] = spread(content["weights"])
    torch.save(content, saved)
    with pytest.raises(ValueError, match="small.pt: weight .* is not in the file in full"):
        load_checkpoint(saved)


def test_saving_replaces_regular_files_only(tmp_path: Path):
    """An existing file keeps its mode and a link stays one; a pipe or a folder is refused."""
    path, link, pipe = tmp_path / "a.pt", tmp_path / "link.pt", tmp_path / "pipe"
    path.touch(mode=0o600)
    link.symlink_to(path)
    os.mkfifo(pipe)
    save_checkpoint(link, small_model())
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    assert_same_weights(load_checkpoint(path), small_model())
    for wrong in (pipe, tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match=f"^{wrong} is not a regular file$"):
            save_checkpoint(wrong, small_model())
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "link.pt", "pipe"] and pipe.is_fifo()


def test_a_save_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch):
    events = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (
            events.append(name), real(*args)))
    save_checkpoint(tmp_path / "a.pt", small_model())
    assert events == ["fsync", "replace"]


def test_load_names_what_is_no_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="none.pt"):
        load_checkpoint(tmp_path / "none.pt")
    with pytest.raises(ValueError, match=f"{tmp_path.name}.* not a file"):
        load_checkpoint(tmp_path)


def flipped(data: bytes) -> bytes:
    """One bit in the middle of the largest weight turned over."""
    weight = small_model().token_embedding.weight.detach().numpy().tobytes()
    place = data.index(weight) + len(weight) // 2
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


def foreign_zip(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, "hello")
    return buffer.getvalue()


def repeated(data: bytes) -> bytes:
    """A weight is there once more, as zeros."""
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as file, warnings.catch_warnings(action="ignore"):
        name = next(name for name in file.namelist() if name.endswith("data/0"))
        file.writestr(name, bytes(file.getinfo(name).file_size))
    return buffer.getvalue()


DAMAGES = {  # what is done to the file, and what the message must say
    "empty": (lambda data: b"", "not a zip file"),
    **{f"cut to {cut}": (lambda data, cut=cut: data[: int(cut * len(data))], "not a zip file")
       for cut in (0.0001, 0.1, 0.5, 0.99)},
    "one byte short": (lambda data: data[:-1], "not a zip file"),
    "one bit flipped": (flipped, "CRC-32 .*data/0"),
    "text": (lambda data: b"Once upon a time\n" * 100, "not a zip file"),
    "an entry twice": (repeated, "an entry is there twice"),
    "zip": (lambda data: foreign_zip("hello.txt"), "not in a subdirectory: hello.txt"),
    "foreign pickle": (lambda data: foreign_zip("archive/data.pkl"), "version"),
}


@pytest.mark.parametrize("damage, fault", DAMAGES.values(), ids=DAMAGES)
def test_load_refuses_damaged_files(damage: Callable, fault: str, saved: Path):
    """torch.load alone returns a model with the flipped bit in it."""
    saved.write_bytes(damage(saved.read_bytes()))
    with (warnings.catch_warnings(action="ignore"),  # a refusal must not rest on a warning
          pytest.raises(ValueError, match=f"small.pt: .*{fault}") as error):
        load_checkpoint(saved)
    assert str(saved) in str(error.value) and "\n" not in str(error.value)


def test_a_bit_flipped_anywhere_is_refused_or_harmless(saved: Path):
    """The zip's own directory has no checksum: flipped there, a bit can leave a weight unread."""
    data, expected, loads, places = saved.read_bytes(), small_model(), 0, 0
    for place in (*range(0, len(data) - 4000, 1499), *range(len(data) - 4000, len(data), 13)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        saved.write_bytes(damaged)
        places += 1
        with contextlib.suppress(ValueError):
            loaded = load_checkpoint(saved)
            assert loaded.config == SMALL
            assert_same_weights(loaded, expected)
            loads += 1
    assert 0 < loads < places / 2  # in some places, such as padding, a bit has no meaning


@pytest.mark.parametrize("content", [[1, 2], {}, small_model().state_dict(), small_model(), 3])
@pytest.mark.parametrize("as_zip", [True, False])
def test_load_refuses_what_others_save(content: object, as_zip: bool, tmp_path: Path):
    torch.save(content, tmp_path / "other.pt", _use_new_zipfile_serialization=as_zip)
    fault = "not an octlm checkpoint|not a pickle of tensors" if as_zip else "not a zip file"
    with pytest.raises(ValueError, match=f"other.pt: .*({fault})"):
        load_checkpoint(tmp_path / "other.pt")


class MakesAFolder:
    """When a careless reader unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", ["facts", "weights", None])
def test_load_runs_nothing(place: str | None, saved: Path, tmp_path: Path):
    made = tmp_path / "made"
    content = content_of(saved)
    content[place or "format"] = MakesAFolder(made)
    torch.save(content if place else MakesAFolder(made), saved)
    with pytest.raises(ValueError, match="small.pt: ") as error:
        load_checkpoint(saved)
    assert not made.exists() and "will likely succeed" not in str(error.value)  # torch's advice
    torch.load(saved, weights_only=False)
    assert made.exists()  # the file was live


QUERY = "blocks.1.attention.query.weight"
WRONG_CONTENTS = [  # where, key, value (None: remove it), and what the message must name
    ("", "format", 2, "format must be 1, got 2"),
    ("", "format", None, "not an octlm checkpoint"),
    ("", "config", None, "config"),
    ("", "weights", None, "weights"),
    ("", "weights", [1, 2], "weights"),
    ("config", "d_ff", None, "config fields missing or unexpected: d_ff"),
    ("config", "colour", "red", "config fields .*unexpected: colour"),
    ("config", "n_layers", 0, "n_layers"),
    ("config", "n_layers", 3, "Missing.*blocks.2"),
    ("config", "n_layers", 10**9, "layers"),
    ("config", "vocab_size", 2**62, "overflow"),
    ("config", "rope_base", math.nan, "rope_base"),
    ("config", "position", ["rope"], "position"),
    ("weights", QUERY, None, f"Missing.*{QUERY}"),
    ("weights", "blocks.2.extra.weight", torch.zeros(2), "Unexpected.*blocks.2.extra.weight"),
    ("weights", "lm_head.weight", torch.zeros(61, 64), "Unexpected.*lm_head.weight"),
    ("weights", QUERY, torch.zeros(64, 63), rf"{QUERY}.*\[64, 63\].*\[64, 64\]"),
    ("weights", QUERY, torch.zeros(1, 64), rf"{QUERY}.*\[1, 64\].*\[64, 64\]"),
    ("weights", QUERY, torch.eye(64) * math.nan, f"{QUERY} is not finite"),
    ("weights", QUERY, torch.eye(64).double() * 1e300, f"{QUERY} is not finite"),
    ("weights", "blocks.0.feed_forward.up.weight", torch.zeros(64, 48),
     r"feed_forward.up.weight.*\[64, 48\].*\[48, 64\]"),
    ("weights", QUERY, [1.0, 2.0], QUERY),
    ("weights", QUERY, torch.eye(64).long(), QUERY),
    ("weights", QUERY, torch.eye(64).cfloat(), QUERY),
    ("weights", QUERY, torch.eye(64).to_sparse(), "torage"),
    ("weights", 3, torch.eye(64), "startswith|keys"),
    ("", "format", "1", "format must be 1, got '1'"),
    ("", "format", True, "format must be 1, got True"),
    ("", "format", 1.0, "format must be 1, got 1.0"),
    ("", "format", torch.ones(2), "format must be 1, got tensor"),
    ("facts", "fact", torch.ones(2), "Tensor is not JSON serializable"),
    ("facts", "fact", math.nan, "Out of range float values are not JSON compliant"),
    ("", "format", 0, "format must be 1, got 0"),
]


@pytest.mark.parametrize("place, key, value, fault", WRONG_CONTENTS)
def test_load_refuses_wrong_contents(place: str, key: str, value: object, fault: str, saved: Path):
    """The message names the file and the fault."""
    content = content_of(saved)
    target = content[place] if place else content
    target[key] = value
    if value is None:
        del target[key]
    torch.save(content, saved)
    with pytest.raises(ValueError, match=f"small.pt: .*{fault}"):
        load_checkpoint(saved)


@pytest.mark.parametrize("fact", [
    torch.zeros(2), {1, 2}, math.nan, Path("a"), b"a",
    pytest.param(10**700, id="an integer that torch.load would refuse"),
    pytest.param(functools.reduce(lambda inner, _: [inner], range(10**5), []), id="nested deeply"),
], ids=str)
def test_facts_must_be_json(fact: object, saved: Path):
    before = saved.read_bytes()
    with pytest.raises(ValueError, match="facts must be JSON|not a pickle of tensors and plain"):
        save_checkpoint(saved, small_model(seed=2), fact=fact)
    assert saved.read_bytes() == before


@pytest.mark.parametrize("change", [
    lambda model: model.blocks[1].attention.query.weight.data.fill_(math.nan),
    lambda model: model.half().token_embedding.weight.data.fill_(math.inf),
    lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(torch.zeros(61, 64))),
], ids=["nan", "inf", "untied"])
def test_what_would_not_load_replaces_no_file(change: Callable, saved: Path):
    before, model = saved.read_bytes(), small_model(seed=2)
    change(model)
    with pytest.raises(ValueError, match="not finite|Unexpected.*lm_head"):
        save_checkpoint(saved, model)
    assert saved.read_bytes() == before and os.listdir(saved.parent) == ["small.pt"]


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """What a full disk does: no file can be written beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("fault", [OSError("disk full"), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_an_interrupted_save_keeps_the_old_file(fault, place: str, saved: Path, monkeypatch):
    before = saved.read_bytes()

    def fail(*args: object) -> None:
        assert Path(f"{saved}.partial").stat().st_size > len(before) / 2
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(os, place, fail)
        with pytest.raises(type(fault)):
            save_checkpoint(saved, small_model(seed=2))
    assert saved.read_bytes() == before and os.listdir(saved.parent) == ["small.pt"]
    with file_size_limit(len(before) // 2), pytest.raises(OSError) as full:
        save_checkpoint(saved, small_model(seed=2))
    assert full.value.errno == errno.EFBIG  # what the system says
    assert saved.read_bytes() == before and os.listdir(saved.parent) == ["small.pt"]
    Path(f"{saved}.partial").touch()  # what a killed save leaves behind is in nobody's way
    save_checkpoint(saved, small_model(seed=2))
    assert_same_weights(load_checkpoint(saved), small_model(seed=2))
    assert os.listdir(saved.parent) == ["small.pt"]


# Random search -----------------------------------------------------------------------------------


# What rounding may move a logit by, as a share of the largest. Over 4,000 cases 99 in 100 stayed
# below 5e-7, 2e-3 and 2e-2; a few models magnify it tenfold.
ROUNDING = {torch.float32: 5e-5, torch.float16: 3e-2, torch.bfloat16: 4e-1}


def random_config(pick: random.Random) -> DecoderConfig:
    """A small config in which every field varies."""
    position = pick.choice(("rope", "rope", "learned"))
    head_size = pick.choice((2, 4, 6, 8) if position == "rope" else (1, 2, 3, 8))
    n_kv_heads, shared = pick.choice((1, 1, 2, 3)), pick.choice((1, 2, 3, 4))
    context = pick.randint(1, 12)
    window = pick.choice((0, 0, pick.randint(1, context)))
    return DecoderConfig(
        vocab_size=pick.randint(2, 40),
        context_length=context,
        n_layers=pick.randint(1, 3),
        n_heads=n_kv_heads * shared,
        n_kv_heads=n_kv_heads,
        d_model=n_kv_heads * shared * head_size,
        d_ff=pick.randint(1, 24),
        position=position,
        rope_base=pick.choice((1.5, 50.0, 1e4, 1e6)),
        rope_scale=pick.choice((0.3, 1, 4.0)),
        attention=pick.choice(("sdpa", "sdpa", "manual")),
        attention_window=window,
        kv_compress_block=pick.choice((0, pick.randint(1, context + 1))) if window else 0,
        dropout=pick.choice((0, 0.3)),
        norm_eps=pick.choice((1e-6, 1e-2)),
    )


def check_random_case(seed: int) -> list[str]:
    """Compare all paths of one random model, prompt and sampling; everything follows from the seed.

    Logits: full pass, random cached chunks and loops, within rounding in three dtypes. Tokens, in
    float32: both generators, both streams and the loops must choose alike. Where they do not, the
    logits behind the two choices must agree within rounding: returns a line for each such choice.
    """
    pick, near = random.Random(seed), []
    config = random_config(pick)
    dtype = pick.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16))
    model, context = small_model(seed, **asdict(config)).to(dtype), config.context_length
    with torch.no_grad():  # gentle enough that half precision can be held to a bound
        for weight in model.blocks.parameters():
            weight.mul_(0.6)
    batch, length = pick.randint(1, 3), pick.randint(1, context + 3)
    prompt = torch.randint(config.vocab_size, (batch, length), generator=seeded(seed))
    full_sdpa = config.attention == "sdpa" and not config.attention_window

    def by_loops(text: Tensor) -> Tensor:
        return torch.tensor(np.stack([reference_logits(model, row.tolist()) for row in text]))

    def in_random_chunks(text: Tensor) -> Tensor:
        rows, cache = [], None
        while text.shape[1]:
            new = pick.randint(1, text.shape[1])
            logits, cache = model.forward_cached(text[:, :new], cache)
            rows, text = [*rows, logits], text[:, new:]
            held = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(cache))
            saved = cache[0][0].shape[2]
            assert held == batch * octlm.kv_cache_bytes(config, saved, dtype.itemsize)
        return torch.cat(rows, dim=1)

    def assert_same_logits(text: Tensor) -> None:
        exact = by_loops(text)
        bound = ROUNDING[dtype] * max(exact.abs().max().item(), 1)
        with torch.no_grad():
            assert_near(model(text).double(), exact, bound)
        if full_sdpa:
            assert_near(in_random_chunks(text).double(), exact, bound)

    assert_same_logits(prompt[:, -context:])
    if not full_sdpa:
        with pytest.raises(ValueError, match="^cached forward requires full SDPA attention"):
            model.generate_cached(prompt, 1)
    if dtype != torch.float32:
        return near

    new = pick.randint(0, max(context - length, 0) + 4)
    sampling = {
        "temperature": pick.choice((0.0, 0.0, 0.3, 1.0, 3.0)),
        "top_k": pick.choice((None, 1, 2, 5, 50)),
    }
    text = model.generate(prompt, new, **sampling, generator=seeded(seed))
    others = {"naive stream": model.stream(
        prompt, new, cached=False, **sampling, generator=seeded(seed))}
    if full_sdpa:
        others["cached"] = model.generate_cached(
            prompt, new, **sampling, generator=seeded(seed))[:, length:].split(1, dim=1)
        others["cached stream"] = model.stream(prompt, new, **sampling, generator=seeded(seed))
    for name, tokens in others.items():
        other = torch.cat((prompt, *tokens), dim=1)
        assert other.shape == text.shape
        if not torch.equal(other, text):
            place = int((other != text).any(dim=0).nonzero()[0])
            assert_same_logits(text[:, :place][:, -context:])
            near.append(f"seed {seed}: {name} differs at {place}")

    draws, rows = seeded(seed), by_loops(text[:, :context])
    for place in range(length, length + new):
        exact = rows[:, place - 1] if place <= context else by_loops(
            text[:, place - context : place])[:, -1]
        token = octlm.sample(exact.float(), **sampling, generator=draws)
        if not torch.equal(token, text[:, place : place + 1]):
            assert_same_logits(text[:, :place][:, -context:])
            near.append(f"seed {seed}: the loops choose otherwise at {place}")
    return near


@pytest.mark.parametrize("seed", range(100))
def test_random_cases(seed: int):
    """Every path of a random small model agrees, but for choices within rounding, which the
    contract allows; far more cases by `python test_octlm.py --cases N`."""
    check_random_case(seed)


# The trained model -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tokenizer() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(TOKENIZER))


@pytest.fixture(scope="session")
def trained() -> Decoder:
    return load_checkpoint(CHECKPOINT)


@pytest.fixture(scope="session")
def greedy(trained: Decoder) -> tuple[Tensor, Tensor]:
    """512 greedy tokens after BOS by the cached path, and the logits of one full pass over them."""
    tokens = trained.generate_cached(torch.tensor([[1]]), 512)
    with torch.inference_mode():
        return tokens, trained(tokens[:, :-1])


def test_trained_model_is_the_default_one(trained: Decoder):
    assert trained.config == DecoderConfig(vocab_size=8192)
    assert {w.dtype for w in content_of(CHECKPOINT)["weights"].values()} == {torch.float16}


def test_trained_model_greedy_to_the_end_of_the_context(greedy):
    """Every cached step against the full pass; a model stuck on few tokens would show little."""
    tokens, logits = greedy
    assert torch.equal(logits.argmax(dim=-1), tokens[:, 1:])
    assert tokens.unique().numel() >= 60


def test_trained_model_sampled_to_the_end_of_the_context(trained: Decoder):
    """The sampler replayed on the logits of one full pass, with the same seed."""
    sampling = {"temperature": 0.8, "top_k": 40}
    tokens = trained.generate_cached(torch.tensor([[1]]), 512, **sampling, generator=seeded(0))
    with torch.inference_mode():
        logits = trained(tokens[:, :-1])
    generator = seeded(0)
    rows = [octlm.sample(logits[:, i], **sampling, generator=generator) for i in range(512)]
    assert torch.equal(torch.cat(rows, dim=1), tokens[:, 1:])


def test_trained_model_in_chunks(trained: Decoder, greedy):
    """Logits at all 512 positions, not only the largest of each."""
    tokens, logits = greedy
    assert_near(in_chunks(trained, tokens[:, :-1], (200, 1, 1, 310)), logits, 2e-4)


def test_trained_model_naive_equals_cached(trained: Decoder, greedy):
    assert torch.equal(trained.generate(torch.tensor([[1]]), 64), greedy[0][:, :65])


# day5.py cache -----------------------------------------------------------------------------------


class Run:
    """What day5.main(arguments) returned and printed; wrong arguments leave by SystemExit."""

    def __init__(self, capsys, *arguments: object) -> None:
        capsys.readouterr()
        try:
            self.status = day5.main([str(argument) for argument in arguments])
        except SystemExit as leave:
            self.status = leave.code
        self.out, self.err = capsys.readouterr()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A checkpoint for the shipped tokenizer that costs next to nothing to run."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.pt"
    save_checkpoint(path, small_model(vocab_size=8192, context_length=512))
    return path


@over_paths
def test_the_timer_waits_for_the_device(cached: bool, monkeypatch):
    """A clock read while a GPU still works times nothing; one started too late, less."""
    events, name = [], "generate_cached" if cached else "generate"
    clock = SimpleNamespace(perf_counter=lambda: events.append("clock") or len(events) / 7)
    monkeypatch.setattr(day5, "time", clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: events.append("device"))
    model = SimpleNamespace(**{name: lambda *given: events.append(given)})
    prompt = SimpleNamespace(device=torch.device("cuda"))
    _, seconds = day5.timed_generation(model, prompt, 5, cached)
    assert events == ["device", "clock", (prompt, 5), "device", "clock"]
    assert seconds == 5 / 7 - 2 / 7


FIELDS = [
    "cache_bytes", "cached_seconds", "cached_tokens_per_second", "checkpoint_sha256", "device",
    "dtype", "greedy_equal", "hardware", "length", "naive_seconds", "naive_tokens_per_second",
    "python", "pytorch", "speedup", "threads", "time", "type", "weight_bytes",
]
DIFFERENCE = ["first_difference", "tokens", "gap", "max_logit_difference"]


def test_cache_stage(tmp_path: Path, capsys):
    """As a user runs it, from another folder: fields, their values, and no second measurement."""
    command = [sys.executable, HERE / "day5.py", "cache", "--lengths", "4", "8", "--repeats", "2"]
    command += ["--device", "cpu", "--threads", "1", "--out", "rows.jsonl"]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}  # the default that --threads overrides
    start = datetime.now(UTC).replace(microsecond=0)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "rows.jsonl"
    for line, length in zip(path.read_text().splitlines(), (4, 8), strict=True):
        row = json.loads(line)
        assert list(row) == FIELDS and line == json.dumps(row, sort_keys=True)
        naive, cached = row["naive_seconds"], row["cached_seconds"]
        assert len(naive) == len(cached) == 2 and min(naive + cached) > 0
        naive, cached = statistics.median(naive), statistics.median(cached)
        assert start <= datetime.fromisoformat(row["time"]) <= datetime.now(UTC)
        expected = {
            "type": "cache_benchmark", "length": length, "greedy_equal": True, "device": "cpu",
            "naive_tokens_per_second": length / naive, "speedup": naive / cached,
            "cached_tokens_per_second": length / cached, "cache_bytes": 8192 * length,
            "weight_bytes": 26_255_872 * 4, "dtype": "torch.float32", "threads": 1,
            "python": platform.python_version(), "pytorch": torch.__version__,
            "checkpoint_sha256": hashlib.sha256(CHECKPOINT.read_bytes()).hexdigest(),
        }
        assert {name: row[name] for name in expected} == expected
        assert f"{row['speedup']:.2f}x" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80 and "length 8" in done.stderr
    before = path.read_bytes()
    again = Run(capsys, "cache", "--out", path)
    assert (again.status, again.out, again.err.count("\n")) == (1, "", 1)
    assert "already contains a measurement" in again.err and path.read_bytes() == before


# The naive path's share of each repeat's time. Its median is 0.7: no mean, no first, no last.
SHARES = {64: (0.9, 0.1, 0.7), 256: (0.7, 0.9, 0.1), 512: (0.1, 0.7, 0.9)}


def test_the_cache_stage_on_a_chosen_clock(tiny: Path, tmp_path: Path, monkeypatch, capsys):
    """With its default lengths and repeats: what it does, in which order, and what it reports.

    Each repeat takes length * (length + 128) ms, so that the time left is known.
    """
    monkeypatch.chdir(tmp_path)
    out, events, clock, load = Path("rows.jsonl"), [], [0.0], day5.load

    def timed(model: Decoder, prompt: Tensor, length: int, cached: bool) -> tuple[Tensor, float]:
        assert prompt.tolist() == [[1]] and {w.dtype for w in model.parameters()} == {torch.float16}
        share = SHARES[length][events.count((length, cached))] if length in SHARES else 0.5
        seconds = (1 - share if cached else share) * length * (length + 128) / 1000
        clock[0] += seconds if length in SHARES else 0.0
        events.append((length, cached))
        return torch.arange(1, length + 2)[None], seconds

    def loaded(args: argparse.Namespace) -> tuple:
        events.append(("loaded", out.exists()))
        return load(args)

    def synced(file: int) -> None:
        events.append(("synced", out.read_text().count("\n")))

    monkeypatch.setattr(day5, "timed_generation", timed)
    monkeypatch.setattr(day5, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(day5, "load", loaded)
    monkeypatch.setattr(os, "fsync", synced)
    threads = torch.get_num_threads()
    try:
        run = Run(capsys, "cache", "--checkpoint", tiny, "--device", "cpu", "--dtype", "float16",
                  "--threads", threads + 1, "--out", out)
    finally:
        torch.set_num_threads(threads)
    assert run.status == 0, run.err
    expected = [("synced", 1), ("loaded", False), (8, False), (8, True)]
    for count, length in enumerate(SHARES, start=1):
        expected += [(length, False), (length, True)] * 3 + [("synced", count)]
    assert events == expected

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = {line.split(": ", 1)[1] for line in lines if line.startswith("model name")}
    parameters = sum(weight.numel() for weight in load_checkpoint(tiny).parameters())
    rows = lines_of(out)
    for row, (length, shares) in zip(rows, SHARES.items(), strict=True):
        naive = [share * length * (length + 128) / 1000 for share in shares]
        cached = [(1 - share) * length * (length + 128) / 1000 for share in shares]
        middle = shares.index(0.7)
        assert row.pop("hardware") in (names or {platform.processor() or platform.machine()})
        assert row.pop("time")
        assert row == {
            "type": "cache_benchmark", "length": length, "greedy_equal": True, "device": "cpu",
            "naive_seconds": naive, "naive_tokens_per_second": length / naive[middle],
            "cached_seconds": cached, "cached_tokens_per_second": length / cached[middle],
            "speedup": naive[middle] / cached[middle], "cache_bytes": 2 * 2 * 2 * 8 * length * 2,
            "weight_bytes": 2 * parameters, "dtype": "torch.float16", "threads": threads + 1,
            "python": platform.python_version(), "pytorch": torch.__version__,
            "checkpoint_sha256": hashlib.sha256(tiny.read_bytes()).hexdigest(),
        }
    assert run.out.startswith(day5.markdown_table(rows) + "\n")
    left = [", about 1303 s left", ", about 1290 s left", ", about 1278 s left",
            ", about 1180 s left", ", about 1081 s left", ", about 983 s left",
            ", about 655 s left", ", about 328 s left"]
    turns = [f"length {n}, repeat {repeat} of 3" for n in SHARES for repeat in (1, 2, 3)]
    assert run.err.splitlines() == list(map(str.__add__, turns, ["", *left]))


@pytest.mark.parametrize("wrong", range(6))
def test_a_difference_in_any_repeat(wrong: int, tiny, tmp_path: Path, monkeypatch, capsys):
    """One of the six timed runs chose another token, whichever path and repeat it is."""
    runs, out = itertools.count(-2), tmp_path / "rows.jsonl"  # the first two only warm up

    def timed(*_) -> tuple[Tensor, float]:
        return torch.tensor([[1, 5, 6, 7 + (next(runs) == wrong), 8]]), 1.0

    monkeypatch.setattr(day5, "timed_generation", timed)
    run = Run(capsys, "cache", "--checkpoint", tiny, "--lengths", 4, "--out", out)
    assert (run.status, run.out) == (1, "") and next(runs) == 6
    assert run.err.endswith("day5.py: cached generation changed greedy output at length 4\n")
    row, = lines_of(out)
    assert row["greedy_equal"] is False and row["first_difference"] == 3
    assert row["tokens"] == ([8, 7] if wrong == 0 else [7, 8])


def test_max_logit_difference_is_over_all_positions(monkeypatch):
    """And absolute: the largest distance is below zero, and not at the last position."""
    right, shifts = Decoder.forward_cached, {2: -0.5, 5: 0.25}

    def shifted(self: Decoder, token_ids: Tensor, cache: octlm.Cache | None = None):
        logits, cache = right(self, token_ids, cache)
        return logits + shifts.get(cache[0][0].shape[2] - 1, 0.0) * F.one_hot(
            torch.tensor(7), SMALL.vocab_size), cache

    monkeypatch.setattr(Decoder, "forward_cached", shifted)
    expected = random_ids(1, 9)
    actual = expected.clone()
    actual[0, 6:] = (actual[0, 6:] + 1) % SMALL.vocab_size
    row = day5.explain_difference(small_model(), expected, actual)
    assert row["first_difference"] == 6
    assert row["max_logit_difference"] == pytest.approx(0.5, abs=1e-4)


def test_a_row_without_numbers_is_not_written(tiny, tmp_path: Path, monkeypatch, capsys):
    """NaN is no JSON."""
    monkeypatch.setattr(day5, "timed_generation", lambda *_: (torch.tensor([[1, 2]]), math.nan))
    run = Run(capsys, "cache", "--checkpoint", tiny, "--lengths", 1, "--out", tmp_path / "rows")
    assert (run.status, run.out) == (1, "") and "JSON" in run.err.splitlines()[-1]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fault, said", [
    (None, "rows.jsonl already contains a measurement"),
    (OSError(errno.EINVAL, "no fsync here"), "no fsync here: 'rows.jsonl'"),
    (KeyboardInterrupt(), "interrupted"), (0, "'rows.jsonl'"),
], ids=["existing", "no fsync", "Ctrl-C", "full disk"])
def test_out_is_tried_before_anything_is_loaded(fault, said: str, tmp_path, monkeypatch, capsys):
    """By a byte that has to reach the disk. What cannot be kept is closed, then removed."""
    files, unlink = [], Path.unlink

    def opened(*arguments, **options) -> io.FileIO:
        files.append(open(*arguments, **options))
        return files[-1]

    def removed(path: Path, *arguments) -> None:
        assert files[-1].closed  # or Windows would refuse
        unlink(path, *arguments)

    def failed(file: int) -> None:
        raise fault

    monkeypatch.chdir(tmp_path)
    if fault is None:
        Path("rows.jsonl").write_text("rows\n")
    monkeypatch.setattr(day5, "load", lambda args: pytest.fail("loaded first"))
    monkeypatch.setattr(day5, "open", opened, raising=False)
    monkeypatch.setattr(Path, "unlink", removed)
    if isinstance(fault, BaseException):
        monkeypatch.setattr(os, "fsync", failed)
    with file_size_limit(0) if fault == 0 else contextlib.nullcontext():
        run = Run(capsys, "cache", "--out", "rows.jsonl")
    assert (run.status, run.out, run.err.count("\n")) == (1, "", 1) and said in run.err
    assert os.listdir() == (["rows.jsonl"] if fault is None else [])
    assert fault is not None or Path("rows.jsonl").read_text() == "rows\n"


@pytest.mark.parametrize("given, expected", [
    ("auto auto", ("cuda", torch.float16)), ("auto float32", ("cuda", torch.float32)),
    ("cuda:1 bfloat16", ("cuda:1", torch.bfloat16)), ("cpu auto", ("cpu", torch.float32)),
    ("cpu float16", ("cpu", torch.float16)),
])
def test_the_model_goes_to_its_device_in_its_dtype(given: str, expected: tuple, monkeypatch):
    """On a machine with two GPUs, each called by its name in the rows."""
    asked = []
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=8192),
                            to=lambda device, dtype: asked.append((str(device), dtype)) or model)
    monkeypatch.setattr(day5, "load_checkpoint", lambda path: model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", "GPU of {}".format)
    device, dtype = given.split()
    day5.load(argparse.Namespace(
        checkpoint=CHECKPOINT, tokenizer=TOKENIZER, threads=None, device=device, dtype=dtype))
    assert asked == [expected]
    assert day5.hardware_name(torch.device("cuda:1")) == "GPU of cuda:1"


@pytest.mark.parametrize("arguments, fault", [
    (["--out", "link.jsonl"], "link.jsonl already contains a measurement"),
    (["--out", "folder"], "folder already contains a measurement"),
    (["--out", "none/rows.jsonl"], "none/rows.jsonl"),
    (["--lengths", "513", "4"], "cache benchmark requires SDPA and lengths within context"),
    (["--lengths", "4", "513", "8"], "cache benchmark requires SDPA and lengths within context"),
    (["--checkpoint", "window.pt"], "cache benchmark requires SDPA and lengths within context"),
    (["--checkpoint", "manual.pt"], "cache benchmark requires SDPA and lengths within context"),
    (["--checkpoint", "none.pt"], "No such file or directory: 'none.pt'"),
    (["--checkpoint", "small.pt"], "small.pt has 61: they do not belong together"),
    (["--checkpoint", TOKENIZER], "tokenizer.model"),
    (["--tokenizer", "none.model"], "none.model"),
    (["--tokenizer", CHECKPOINT], "octlm-26m.pt"),
    (["--device", "cuda:99"], "cuda:99"),
], ids=str)
def test_a_fault_is_one_line(arguments, fault: str, saved, tmp_path: Path, monkeypatch, capsys):
    """Exit status 1, the fault by name, no traceback, and nothing left behind."""
    monkeypatch.chdir(tmp_path)
    form = {"vocab_size": 8192, "context_length": 512}
    save_checkpoint("window.pt", small_model(**form, attention_window=9))
    save_checkpoint("manual.pt", small_model(**form, attention="manual"))
    Path("folder").mkdir()
    Path("link.jsonl").symlink_to("nowhere.jsonl")
    before = sorted(os.listdir())
    monkeypatch.setattr(day5, "timed_generation", lambda *_: pytest.fail("measured first"))
    run = Run(capsys, "cache", "--lengths", 4, "--out", "rows.jsonl", *arguments)
    assert (run.status, run.out, run.err.count("\n")) == (1, "", 1), run.err
    assert fault in run.err and sorted(os.listdir()) == before


@pytest.mark.parametrize("arguments, fault", [
    ("", "stage"), ("cache", "--out"), ("measure --out a", "measure"),
    ("cache --out a --lengths 0", "--lengths: must be an integer from 1 to 1000000000, got '0'"),
    ("cache --out a --lengths 4 -1", "-1"), ("cache --out a --lengths four", "got 'four'"),
    ("cache --out a --repeats 0", "--repeats: must be an integer from 1 to"),
    ("cache --out a --threads 0", "--threads: must be an integer from 1 to 1024, got '0'"),
    ("cache --out a --threads 1025", "got '1025'"), ("cache --out a --threads abc", "got 'abc'"),
    ("cache --out a --dtype float8", "float8"), ("cache --out a --device tpu", "got 'tpu'"),
    ("cache --out a --device cuda:256", "got 'cuda:256'"),
    ("generate --tokens 0", "--tokens: must be an integer from 1 to"),
    ("generate --top-k -1", "--top-k: must be an integer from 0 to"),
    ("generate --temperature nan", "got nan"), ("generate --temperature -1", "got -1"),
    ("generate --temperature hot", "hot"), ("generate --seed x", "got 'x'"),
    ("generate --seed -1", "--seed: must be an integer from 0 to"),
])
def test_wrong_arguments_exit_with_2(
    arguments: str, fault: str, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(day5, "load", lambda args: pytest.fail("started"))
    run = Run(capsys, *arguments.split())
    assert run.status == 2 and run.out == "" and run.err.startswith("usage: day5.py")
    assert fault in run.err.splitlines()[-1] and "<lambda>" not in run.err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["generate_cached", "_hidden_cached"])
def test_no_speed_is_shown_for_other_tokens(place, tiny, tmp_path: Path, monkeypatch, capsys):
    """A decoder made wrong on purpose, from position 6 on: the first length does not show it."""
    right, right_linear, wrong = getattr(Decoder, place), octlm.Linear.forward, []

    def wrong_tokens(self: Decoder, *arguments, **options) -> Tensor:
        tokens = right(self, *arguments, **options)
        tokens[0, 6:7] = (tokens[0, 6:7] + 1) % 8192
        return tokens

    def after_cached(self: Decoder, token_ids: Tensor, cache: octlm.Cache | None):
        hidden, cache = right(self, token_ids, cache)
        wrong.append(cache[0][0].shape[2] >= 6)
        return hidden, cache

    def head(self: octlm.Linear, x: Tensor) -> Tensor:
        outputs = right_linear(self, x)
        is_wrong = self.out_features == 8192 and wrong and wrong.pop()
        return outputs.roll(1, dims=-1) if is_wrong else outputs

    model = load_checkpoint(tiny)
    truth = model.generate(torch.tensor([[1]]), 8)
    logits = model(truth[:, :6])[0].detach()
    if place == "generate_cached":
        monkeypatch.setattr(Decoder, place, wrong_tokens)
    else:
        monkeypatch.setattr(Decoder, place, after_cached)
        monkeypatch.setattr(octlm.Linear, "forward", head)
    out = tmp_path / "rows.jsonl"
    run = Run(capsys, "cache", "--lengths", 4, 8, 12, "--repeats", 1, "--device", "cpu",
              "--dtype", "float32", "--checkpoint", tiny, "--out", out)
    assert (run.status, run.out) == (1, "") and "Traceback" not in run.err
    last = run.err.splitlines()[-1]
    assert "cached generation changed greedy output at length 8" in last
    first, second = lines_of(out)
    assert sorted(first) == FIELDS and first["length"] == 4 and first["greedy_equal"] is True
    assert sorted(second) == sorted(FIELDS + DIFFERENCE) and second["length"] == 8
    assert second["greedy_equal"] is False and second["first_difference"] == 6
    assert second["tokens"] == [truth[0, 6], (truth[0, 6] + 1) % 8192]
    best, next_best = logits[-1].topk(2).values.tolist()
    assert second["gap"] == pytest.approx(best - next_best, abs=1e-4)
    distance = 0.0
    if place == "_hidden_cached":
        distance = (logits[-1].roll(1) - logits[-1]).abs().max().item()
    assert second["max_logit_difference"] == pytest.approx(distance, abs=1e-3)


def test_cache_bytes_that_differ_from_the_formula(tmp_path: Path, monkeypatch, capsys):
    """No row is written, and no file."""
    monkeypatch.setattr(day5, "kv_cache_bytes", lambda *arguments: 1)
    run = Run(capsys, "cache", "--lengths", 4, "--repeats", 1, "--out", tmp_path / "rows.jsonl")
    assert run.status == 1 and run.out == "" and os.listdir(tmp_path) == []
    assert "actual cache bytes differ from the model formula" in run.err.splitlines()[-1]


def test_interrupted_measurement_keeps_its_rows(tmp_path: Path, monkeypatch, capsys):
    timed = day5.timed_generation

    def stop(model: Decoder, prompt: Tensor, length: int, cached: bool) -> tuple[Tensor, float]:
        if length == 6:
            raise KeyboardInterrupt
        return timed(model, prompt, length, cached)

    monkeypatch.setattr(day5, "timed_generation", stop)
    out = tmp_path / "rows.jsonl"
    run = Run(capsys, "cache", "--lengths", 4, 6, "--repeats", 1, "--out", out)
    assert (run.status, run.out) == (1, "") and "Traceback" not in run.err
    assert "interrupted" in run.err.splitlines()[-1] and [r["length"] for r in lines_of(out)] == [4]


def test_a_full_disk_leaves_the_rows_as_they_were(tmp_path: Path):
    """A write that is cut short: the row is taken back, and a file without rows removed."""
    path, row = tmp_path / "rows.jsonl", {"length": 64, "cached_seconds": [1.0] * 50}
    line = json.dumps(row) + "\n"
    day5.append_line(path, line, first=True)
    before = path.read_bytes()
    with file_size_limit(len(before) + 20):
        for full in (path, tmp_path / "new.jsonl"):
            with pytest.raises(OSError, match=full.name):
                day5.append_line(full, 900 * "x" + "\n", first=full != path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["rows.jsonl"]
    with pytest.raises(FileExistsError):  # somebody else's rows, made in the meantime
        day5.append_line(path, line, first=True)
    day5.append_line(path, line)
    assert lines_of(path) == [row, row]


def without_bos(path: Path) -> None:
    """A tokenizer trained like the shipped one, but for the token that begins a text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d e"] * 9), model_writer=model, model_type="bpe",
        vocab_size=270, byte_fallback=True, bos_id=-1, minloglevel=2, hard_vocab_limit=False)
    path.write_bytes(model.getvalue())


@pytest.mark.parametrize("content", [b"", b"hello", without_bos], ids=["empty", "text", "no BOS"])
def test_a_tokenizer_that_cannot_serve(content: bytes | Callable, tmp_path: Path, capsys):
    path = tmp_path / "odd.model"
    content(path) if callable(content) else path.write_bytes(content)
    run = Run(capsys, "generate", "--tokenizer", path)
    assert (run.status, run.out, run.err.count("\n")) == (1, "", 1) and "odd.model" in run.err


# day5.py generate --------------------------------------------------------------------------------


PROMPT, STORY = "  Ønce", " né 👩\u200d👩\u200d👧  two  spaces\n\tשלום <s> 日本 \n"


@pytest.fixture(scope="session")
def speller(tokenizer, tmp_path_factory) -> Path:
    """A model whose learned positions alone spell PROMPT, STORY and end-of-text."""
    said = [*tokenizer.encode(PROMPT), *tokenizer.encode(STORY), 2]
    model = Decoder(replace(TINY, vocab_size=8192, context_length=100, d_model=64, n_layers=1,
                            position="learned", dropout=0.0))
    with torch.no_grad():
        F.normalize(model.token_embedding.weight.normal_(), out=model.token_embedding.weight)
        model.position_embedding.weight[: len(said)] = 100 * model.token_embedding.weight[said]
    path = tmp_path_factory.mktemp("speller") / "speller.pt"
    save_checkpoint(path, model)
    return path


@pytest.mark.parametrize("limit", [100, 6, 7, 12])
@pytest.mark.parametrize("options", [[], ["--no-cache"]], ids=str)
def test_text_is_streamed(limit: int, options, speller: Path, tokenizer, monkeypatch, capsys):
    """Piece by piece, no character in halves; joined, it is `decode` of all tokens at once."""
    writes: list[str] = []
    stdout = SimpleNamespace(write=writes.append, flush=lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        status = day5.main(["generate", "--checkpoint", str(speller), "--prompt", PROMPT,
                            "--temperature", "0", "--tokens", str(limit), "--device", "cpu",
                            *options])
    assert status == 0
    prompt, story = tokenizer.encode(PROMPT), tokenizer.encode(STORY)
    whole = limit > len(story)
    expected = PROMPT + STORY if whole else tokenizer.decode(prompt + story[:limit])
    assert "".join(writes) == expected + "\n"
    if whole:
        assert len([piece for piece in writes if piece]) > 15
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in writes)
    made = len(story) + 1 if whole else limit
    config = load_checkpoint(speller).config
    positions = 0 if options else 1 + len(prompt) + made - 1  # BOS, but not the last token
    size = octlm.kv_cache_bytes(config, positions, 4)
    err = capsys.readouterr().err
    assert f"text: {made} tokens" in err and err.endswith(f"; {size:,} cache bytes\n")


def test_generate_gives_the_same_text_without_cache(trained, tokenizer, monkeypatch, capsys):
    """The defaults, sampled; with the cache by one cached pass per token, without it by none."""
    ids = torch.tensor([[1, *tokenizer.encode("Once upon a time")]])
    made = trained.generate(ids, 30, temperature=0.8, top_k=40, generator=seeded(0))[0].tolist()
    assert 2 not in made
    passes, right = [], Decoder._hidden_cached
    monkeypatch.setattr(Decoder, "_hidden_cached",
                        lambda *given: passes.append(1) or right(*given))
    for options, count in (([], 30), (["--no-cache"], 0)):
        run = Run(capsys, "generate", "--tokens", 30, "--device", "cpu", *options)
        assert (run.status, run.out) == (0, tokenizer.decode(made) + "\n")
        assert run.err.count("\n") == 1 and len(passes) == count
        passes.clear()


@pytest.mark.parametrize("options, stdin, expected", [
    ([], b"", {}),
    (["--tokens", 3, "--temperature", 0.5, "--top-k", 7, "--seed", 2**63 - 1], b"",
     {"count": 3, "temperature": 0.5, "top_k": 7, "seed": 2**63 - 1}),
    (["--no-cache", "--top-k", 0], b"", {"cached": False, "top_k": None}),
    (["--prompt", "-"], b" a\r\n\tb  \n\n", {"prompt": " a\r\n\tb  \n"}),
    (["--prompt", "-"], b"", {"prompt": ""}),
    (["--prompt", ""], b"x", {"prompt": ""}),
    (["--prompt", "a b " * 300], b"", {"prompt": "a b " * 300}),
], ids=["defaults", "sampling", "no cache", "stdin", "nothing on stdin", "empty", "long"])
def test_what_generate_asks_of_the_model(
    options: list, stdin: bytes, expected: dict, tiny, tokenizer, monkeypatch, capsys
):
    """And what it says of the answer; only EOS (2) ends it, not BOS, an unknown token or a byte."""
    clock, given, rest = itertools.count(10, 2), {}, iter([5, 1, 0, 16, 9000 - 8192, 2, 5])

    def stream(model, ids: Tensor, count: int, cached=True, *, temperature, top_k, generator):
        given.update(prompt=ids.tolist(), count=count, cached=cached, temperature=temperature,
                     top_k=top_k, seed=generator.initial_seed())
        return (torch.tensor([[token]]) for token in rest)

    monkeypatch.setattr(Decoder, "stream", stream)
    monkeypatch.setattr(day5, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    run = Run(capsys, "generate", "--checkpoint", tiny, "--device", "cpu", *options)
    expected = {"prompt": "Once upon a time", "count": 200, "cached": True, "temperature": 0.8,
                "top_k": 40, "seed": 0} | expected
    ids = [1, *tokenizer.encode(expected["prompt"])]
    assert given == expected | {"prompt": [ids]} and list(rest) == [5]
    assert (run.status, run.out) == (0, tokenizer.decode([*ids, 5, 1, 0, 16, 808]) + "\n")
    held = 2 * 2 * 2 * 8 * 4 * min(len(ids) + 5, 512) if expected["cached"] else 0
    assert run.err == (f"prompt: {len(ids)} tokens in 2.00 s; text: 6 tokens, 0.5 tokens/s; "
                       f"{held:,} cache bytes\n")


def test_a_single_token_has_no_speed_of_its_own(tiny: Path, capsys):
    run = Run(capsys, "generate", "--checkpoint", tiny, "--device", "cpu", "--tokens", 1)
    assert run.status == 0
    assert re.fullmatch(r"prompt: 5 tokens in [0-9.]+ s; text: 1 tokens; 1,280 cache bytes\n",
                        run.err)


def test_text_after_a_prompt_that_ends_inside_a_character(tokenizer):
    """The character comes in one piece, once it is whole; what never becomes whole, at the end."""
    ids = [1, *tokenizer.encode("a👩")]
    for cut in range(len(ids) + 1):
        assert list(filter(None, day5.text_pieces(tokenizer, ids[:cut], ids[cut:]))) in (
            ["a👩"], ["a", "👩"])
        pieces = list(day5.text_pieces(tokenizer, ids[:cut], []))
        assert "".join(pieces) == tokenizer.decode(ids[:cut])
    ids = tokenizer.encode("a\N{REPLACEMENT CHARACTER}")
    assert "".join(day5.text_pieces(tokenizer, ids, ids)) == tokenizer.decode(ids + ids)


@pytest.mark.parametrize("prompt", [b"a\xffb", b"\xc3", b"a\xed\xa0\x80"], ids=repr)
@pytest.mark.parametrize("by_stdin", [True, False])
def test_a_prompt_that_is_not_utf8(prompt: bytes, by_stdin: bool, monkeypatch, capsys):
    """On standard input, and as an argument, where Python holds such bytes as surrogates."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt)))
    given = "-" if by_stdin else prompt.decode(errors="surrogateescape")
    run = Run(capsys, "generate", "--prompt", given)
    assert (run.status, run.out, run.err.count("\n")) == (1, "", 1) and "UTF-8" in run.err


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_an_unwritable_stderr_costs_nothing(redirection: str):
    command = f"'{sys.executable}' '{HERE / 'day5.py'}' generate --tokens 2 {redirection}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Once upon a time")
    assert "tokens/s" not in done.stdout and done.stderr == ""


def test_a_terminal_without_the_character():
    command = [sys.executable, HERE / "day5.py", "generate", "--prompt", "é", "--tokens", "2"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.startswith("?")


@pytest.mark.parametrize("target, said", [
    ("pipe", "day5.py: standard output was closed\n"),
    ("/dev/full", "day5.py: [Errno 28] No space left on device\n"),
])
def test_an_unwritable_stdout_is_a_failure(target: str, said: str, tiny: Path):
    """The exit status is that of the command itself, not that of a shell's pipe."""
    if target == "pipe":
        reader, stdout = os.pipe()
        os.close(reader)
    else:
        stdout = os.open(target, os.O_WRONLY)
    command = [sys.executable, HERE / "day5.py", "generate", "--tokens", "2", "--checkpoint", tiny]
    with open(stdout, "wb") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, said)


# Training, the scripts, the page and README ======================================================


# Tokenizer ---------------------------------------------------------------------------------------


def test_tokenizer_layout(tokenizer):
    assert (tokenizer.vocab_size(), tokenizer.bos_id(), tokenizer.eos_id()) == (8192, 1, 2)
    assert tokenizer.decode(tokenizer.encode("a\u2581b")) == "a b"  # the one exception


@pytest.mark.parametrize("text", [
    "Once upon a time", "a\nb\n\n\nc\r\n", "\n", "\ttabs\t\there", "  two  spaces   three ",
    "", " ", " leading", "naïve café Ångström e\u0301", "👩\u200d👩\u200d👧 👍🏽 🏳️\u200d🌈",
    "a\0b", "שלום עולם", "مرحبا\u200f!", "<s> </s> <unk> <0x41>", "日本語 한국어", "\ufeffa",
    "\U0010ffff", "1234567890 3.14", "\u00a0\u3000",
], ids=ascii)
def test_tokenizer_is_lossless(text: str, tokenizer):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.unk_id(), tokenizer.bos_id(), tokenizer.eos_id()} & set(ids)


def test_tokenizer_takes_a_megabyte_in_one_line(tokenizer):
    text = "Tim saw a big dog. \u200d" * 50_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


# Training ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def train() -> ModuleType:
    return script("checkpoints/train.py")


TINY = replace(SMALL, context_length=8, n_heads=2, n_kv_heads=1, d_model=16, d_ff=16, dropout=0.2)
DOCUMENTS = [random_ids(1, n, seed=n)[0].to(torch.int32) for n in (5, 17, 9, 30, 3, 12)]
SETTINGS = {  # ten steps, through several epochs
    "config": TINY, "documents": DOCUMENTS, "tokens": 160, "batch": 2, "learning_rate": 0.01,
    "seed": 3, "evaluate_every": 40,  # a step has 16
}


def evaluate(model: Decoder) -> float:
    """Stands for a score; draws random numbers, as training must survive."""
    assert not model.training
    return float(model.generate(torch.tensor([[1]]), 4, temperature=1.0).sum())


PIECES = [torch.tensor(ids, dtype=torch.int32) for ids in  # cut marks are 0
          ([0, 7, 8, 9, 3, 11, 0], [1, 5, 6, 12, 0], [0, 4, 13, 2, 6, 2], [0, 10, 0])]


def train_by_the_formulas(initial: Decoder, dtype: str) -> list[tuple[dict, float]]:
    """Twenty steps of SETTINGS and PIECES: after each the weights and the loss, in plain code."""
    model, seed, width = copy.deepcopy(initial).train(), 3, 8
    weights = dict(model.named_parameters())
    average = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    squares = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    rates = [0.005] + [0.01] * 15 + [0.008, 0.006, 0.004, 0.002]
    after = []
    for step, rate in enumerate(rates):
        texts = DOCUMENTS if step >= 16 else DOCUMENTS + PIECES
        place, count = step - 16 if step >= 16 else step, sum(map(len, texts))
        epoch, place = divmod(place, (count - 1) // width // 2)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        stream = [int(i) for k in torch.randperm(len(texts), generator=generator) for i in texts[k]]
        order = torch.randperm((count - 1) // width, generator=generator).tolist()
        total, counted = 0.0, 0
        for k in order[2 * place : 2 * place + 2]:
            inputs, targets = stream[width * k :][:width], stream[width * k + 1 :][:width]
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                logits = model(torch.tensor([inputs]))[0].float()
            for row, before, target in zip(logits, inputs, targets):
                if before != 0 and target != 0:
                    total, counted = total - row.log_softmax(0)[target], counted + 1
        grads = torch.autograd.grad(total / counted, list(weights.values()))
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
        assert norm > 1.5  # or clipping would not show
        with torch.no_grad():
            for (name, weight), grad in zip(weights.items(), grads):
                grad, matrix = grad / norm, name.startswith("blocks") and weight.ndim == 2
                if matrix:
                    weight.mul_(1 - rate * 5)
                if matrix and dtype == "bfloat16":
                    average[name] = 0.95 * average[name] + 0.05 * grad
                    x = (0.05 * grad + 0.95 * average[name]).bfloat16()
                    x = x.T if x.shape[0] > x.shape[1] else x
                    x = x / x.norm()
                    for _ in range(5):
                        gram = x @ x.T
                        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
                    x = x.T if weight.shape[0] > weight.shape[1] else x
                    weight.sub_(rate * 0.2 * math.sqrt(max(weight.shape)) * x)
                else:
                    average[name] = 0.9 * average[name] + 0.1 * grad
                    squares[name] = 0.95 * squares[name] + 0.05 * grad.square()
                    first = average[name] / (1 - 0.9 ** (step + 1))
                    second = squares[name] / (1 - 0.95 ** (step + 1))
                    weight.sub_(rate * first / (second.sqrt() + 1e-8))
        after.append(({name: w.detach().clone() for name, w in weights.items()},
                      (total / counted).item()))
    return after


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_training_equals_the_formulas(dtype: str, tolerance: float, train, tmp_path: Path):
    """The order of documents, targets, cuts, schedule, clipping, decay and both optimizers."""
    torch.manual_seed(5)
    initial = Decoder(replace(TINY, dropout=0.0))
    with torch.no_grad():
        initial.token_embedding.weight.mul_(40)  # gradients that are clipped
    expected = train_by_the_formulas(initial, dtype)
    seen = []

    def remember(model: Decoder) -> float:
        seen.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
        return 0.0

    changes = {"config": initial.config, "tokens": 320, "evaluate_every": 16}
    train.train(**SETTINGS | changes, dtype=dtype, weight_decay=5.0, pieces=PIECES,
                initial=initial, out=tmp_path / "a.pt", evaluate=remember)
    losses = [row["train_loss"] for row in lines_of(tmp_path / "a.pt.jsonl")]
    assert losses == pytest.approx([loss for _, loss in expected], rel=tolerance)
    for step, (weights, _) in enumerate(expected[:-1]):  # the last row is that of float16 weights
        for name in weights:
            difference = (seen[step][name] - weights[name]).abs().max().item()
            assert difference < tolerance * 0.1 * (step + 1), (step, name)
    for name, weight in load_checkpoint(tmp_path / "a.pt").named_parameters():
        assert torch.allclose(weight, expected[-1][0][name], rtol=1e-3, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_dtypes_learn(dtype: str, train, tmp_path: Path):
    """To count in a ring of 16 tokens."""
    count = [(torch.arange(40) + start).remainder(16).to(torch.int32) + 1 for start in range(16)]
    train.train(replace(TINY, dropout=0.0), count, tmp_path / "a.pt", tokens=150 * 64, batch=8,
                learning_rate=0.02, seed=0, dtype=dtype, weight_decay=0.0)
    model = load_checkpoint(tmp_path / "a.pt")
    assert model.generate(torch.tensor([[4, 5]]), 6)[0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


def test_the_dtype_follows_the_processor(train, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags, expected in [({"amx_bf16": True}, "bfloat16"), ({"avx512_bf16": True}, "bfloat16"),
                            ({"avx2": True, "avx512_bf16": False}, "float32"), ({}, "float32")]:
        monkeypatch.setattr(torch.cpu, "get_capabilities", flags.copy)
        assert train.choose_dtype()[0] == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for native in (True, False):  # emulated it is slow
        monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                            lambda including_emulation=True, native=native:
                            including_emulation or native)
        assert train.choose_dtype()[0] == ("bfloat16" if native else "float32")


def test_the_warm_up_of_a_long_run_has_a_fixed_length(train, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(train, "WARMUP_STEPS", 2)
    step, rates = torch.optim.AdamW.step, []

    def remember(optimizer) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", remember)
    train.train(**SETTINGS | {"tokens": 480}, out=tmp_path / "a.pt")  # a tenth: three steps
    assert rates[:4] == [0.005, 0.01, 0.01, 0.01]


@pytest.mark.parametrize("saves", [1, 4, 9, 10])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_equals_an_unbroken_one(
    saves: int, dtype: str, train, tmp_path: Path, monkeypatch
):
    """Bit for bit, with dropout and momentum; the 10th save is the one after the last step.

    The first part was to be shorter, where that may still change: before the last fifth.
    """
    monkeypatch.setattr(train, "SAVE_SECONDS", 0)
    monkeypatch.setattr(train.time, "monotonic", itertools.count().__next__)
    whole, broken = tmp_path / "whole.pt", tmp_path / "broken.pt"
    settings = SETTINGS | {"dtype": dtype, "pieces": PIECES, "weight_decay": 0.3, "keep_every": 56}
    train.train(**settings, out=whole, evaluate=evaluate)
    save, calls = train.save_atomically, []

    def save_and_stop(path: Path, content: memoryview) -> None:
        save(path, content)
        calls.append(path)
        if len(calls) == saves:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train, "save_atomically", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            shorter = settings | {"tokens": 80 if saves < 5 else 160}
            train.train(**shorter, out=broken, evaluate=evaluate)
    assert not broken.exists()
    with open(f"{broken}.jsonl", "a", encoding="utf-8") as rows:  # after the state, before the next
        rows.write('{"step": 10}\n{"st')
    torch.manual_seed(99)
    train.train(**settings, out=broken, evaluate=evaluate, resume=True)
    assert_same_weights(load_checkpoint(broken), load_checkpoint(whole))
    assert {weight.dtype for weight in content_of(whole)["weights"].values()} == {torch.float16}
    assert content_of(whole)["facts"]["tokens"] == 160
    rows = [[{**row, "time": 0} for row in lines_of(Path(f"{path}.jsonl"))]
            for path in (whole, broken)]
    assert rows[0] == rows[1] and [row["step"] for row in rows[0]] == [3, 5, 8, 10]
    assert [row["seconds"] for row in rows[0]] == [3, 5, 8, 10]  # one by this clock per step
    for kept in ("whole-64.pt", "whole-112.pt"):
        resumed = tmp_path / kept.replace("whole", "broken")
        assert_same_weights(load_checkpoint(resumed), load_checkpoint(tmp_path / kept))
    assert not Path(f"{broken}.state").exists()


def test_without_pieces_the_last_fifth_goes_on_in_the_same_order(train, tmp_path, monkeypatch):
    deal, steps = train.Batches.__getitem__, []

    def remember(batches, step: int) -> Tensor:
        steps.append(step)
        return deal(batches, step)

    monkeypatch.setattr(train.Batches, "__getitem__", remember)
    train.train(**SETTINGS, out=tmp_path / "a.pt")
    assert steps == list(range(10))


def test_a_state_is_saved_every_so_many_seconds(train, tmp_path: Path, monkeypatch):
    """By a clock that is read twice a step, and once more after a save."""
    monkeypatch.setattr(train, "SAVE_SECONDS", 6)
    monkeypatch.setattr(train.time, "monotonic", itertools.count().__next__)
    steps = []
    monkeypatch.setattr(
        train, "save_atomically",
        lambda _, content: steps.append(torch.load(io.BytesIO(content))["step"]))
    train.train(**SETTINGS | {"evaluate_every": 1000}, out=tmp_path / "a.pt")
    assert steps == [3, 6, 9]


@pytest.mark.parametrize("existing", ["", ".state", ".jsonl"])
def test_training_overwrites_nothing(existing: str, train, tmp_path: Path):
    path = tmp_path / f"a.pt{existing}"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match=f"{path.name} exists"):
        train.train(**SETTINGS, out=tmp_path / "a.pt")
    assert path.read_text() == "precious" and os.listdir(tmp_path) == [path.name]


@pytest.fixture
def interrupted(train, tmp_path: Path, monkeypatch) -> Path:
    """The checkpoint that a run would have written, had it not stopped at its first evaluation."""
    def stop(model: Decoder) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "SAVE_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        train.train(**SETTINGS, out=tmp_path / "a.pt", evaluate=stop)
    return tmp_path / "a.pt"


@pytest.mark.parametrize("change", [
    {"batch": 3}, {"learning_rate": 0.02}, {"seed": 4}, {"evaluate_every": 64},
    {"config": replace(TINY, dropout=0.0)}, {"documents": DOCUMENTS[1:]}, {"pieces": PIECES},
    {"weight_decay": 0.3}, {"dtype": "float32"},
], ids=lambda change: next(iter(change)))
def test_training_refuses_other_settings(change: dict, train, interrupted: Path):
    """A run goes on from its own state only."""
    before = Path(f"{interrupted}.state").read_bytes()
    with pytest.raises(ValueError, match="a.pt.state was made with another "):
        train.train(**SETTINGS | change, out=interrupted, resume=True)
    assert Path(f"{interrupted}.state").read_bytes() == before


@pytest.mark.parametrize("first, then, steps", [(160, 320, 9), (320, 160, 9), (320, 160, 17)])
def test_tokens_are_fixed_once_the_rate_falls(
    first: int, then: int, steps: int, train, tmp_path: Path, monkeypatch
):
    """By the old number of tokens or by the new: 8 of 10 and 16 of 20 steps are held."""

    def stop(model: Decoder) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "SAVE_SECONDS", 0)
    settings = SETTINGS | {"out": tmp_path / "a.pt", "evaluate_every": 16 * (steps + 1)}
    with pytest.raises(KeyboardInterrupt):
        train.train(**settings | {"tokens": first}, evaluate=stop)
    with pytest.raises(ValueError, match="a.pt.state: too late for other tokens, the rate falls"):
        train.train(**settings | {"tokens": then}, resume=True)


def test_a_loss_that_is_not_a_number_stops_the_run(train, tmp_path: Path):
    initial = Decoder(TINY)
    with torch.no_grad():
        initial.final_norm.weight[0] = math.nan
    with pytest.raises(RuntimeError, match="the loss is nan at step 1"):
        train.train(**SETTINGS, initial=initial, out=tmp_path / "a.pt")
    assert os.listdir(tmp_path) == []


def test_a_gradient_that_is_not_finite_reaches_no_state(train, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(train, "SAVE_SECONDS", 0)
    norms = iter([1.0, 1.0, math.inf])
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(next(norms)))
    with pytest.raises(RuntimeError, match=r"the loss is [\d.]+ at step 3, .*norm inf"):
        train.train(**SETTINGS, out=tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt.state", weights_only=True)["step"] == 2


def test_a_flipped_byte_in_a_state_is_noticed(train, interrupted: Path):
    state = Path(f"{interrupted}.state")
    weight = torch.load(state, weights_only=True)["model"]["final_norm.weight"].numpy().tobytes()
    content = bytearray(state.read_bytes())
    content[content.index(weight)] ^= 1
    state.write_bytes(content)
    with pytest.raises(ValueError, match="a.pt.state is damaged, or no state"):
        train.train(**SETTINGS, out=interrupted, resume=True)


@pytest.mark.parametrize("row", ["\n", "[]\n", "{}\n", "\udcff\n"])
def test_other_rows_are_not_touched(row: str, train, interrupted: Path):
    rows = Path(f"{interrupted}.jsonl")
    rows.write_bytes(row.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="a.pt.jsonl is damaged, or holds other rows"):
        train.train(**SETTINGS, out=interrupted, resume=True)
    assert rows.read_bytes() == row.encode(errors="surrogateescape")


def test_what_the_loss_counts(train, tokenizer):
    """No BOS or EOS at a cut, and neither the mark nor the token after it is a target."""
    text = "Tim saw a big"
    inside = tokenizer.encode(text)
    for kind, first, last in (("whole", 1, 2), ("heads", 1, 0), ("middles", 0, 0), ("tails", 0, 2)):
        assert train.encode(tokenizer, [text], kind)[0].tolist() == [first, *inside, last]
    ids = torch.tensor([[1, 7, 8, 0, 0, 9, 4, 2], [0, 5, 2, 1, 6, 0, 1, 3]])
    assert train.targets_of(ids, 0).tolist() == [[7, 8, -100, -100, -100, 4, 2],
                                                 [-100, 2, 1, 6, -100, -100, 3]]


def test_documents_are_split_at_separator_lines(train, tmp_path: Path):
    text = ("\ufeff<|endoftext|>\n\none\n\ntwo <|endoftext|>\n<|endoftext|>\n\n<|endoftext|>\n"
            "\ufeff<|endoftext|> \t\n  é\n<|endoftext|>\r\n\ufeffthree\r\n")
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    assert train.read_documents(tmp_path / "a.txt") == ["one\n\ntwo <|endoftext|>", "  é", "three"]


def test_each_epoch_has_every_document_in_a_new_order(train):
    documents = [torch.full((5,), start, dtype=torch.int32) for start in range(8)]
    batches = train.Batches(documents, batch=1, context=5, seed=0)
    assert batches.steps_per_epoch == 7  # the last piece would lack its last target
    order = [batches[step][0, 0].item() for step in range(28)]
    epochs = [order[first : first + 7] for first in range(0, 28, 7)]
    assert all(len(set(epoch)) == 7 for epoch in epochs)
    left_out = [min(set(range(8)) - set(epoch)) for epoch in epochs]
    assert len(set(map(tuple, epochs))) == 4 and len(set(left_out)) > 1
    first = [train.Batches(documents, 1, 5, seed)[0].tolist() for seed in range(8)]
    assert len(set(map(str, first))) > 1


STORIES = ["Tim  has 12 cats.\nOne is \ufb01ne \u00bd.", "A dog ran\tto 12. " * 300, "Run, cat!"]
SIZES = json.dumps({"n_layers": 1, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 16,
                    "context_length": 32})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with texts to train on, and `t.model` to be made."""
    for name, stories in {"a": STORIES, "b": STORIES[1:], "cut": STORIES[:1]}.items():
        text = "\n<|endoftext|>\n".join(stories)
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def command(folder: Path, *more: str) -> list[str]:
    """The arguments of a run of two steps; files may come first in `more`."""
    files = list(itertools.takewhile(lambda word: not word.startswith("-"), more))
    more = more[len(files) :]
    return [str(folder / "a.txt"), *files, "--out", str(folder / "out.pt"), "--tokens", "128",
            "--batch", "2", "--tokenizer", str(folder / "t.model"), "--vocab-size", "300",
            "--sizes", SIZES, *more]


def test_the_tokenizer_it_trains(train, folder: Path):
    train.train_tokenizer(STORIES, folder / "t.model", 300)
    made = train.load_tokenizer(folder / "t.model")
    assert made.vocab_size() == 300 and (made.unk_id(), made.bos_id(), made.eos_id()) == (0, 1, 2)
    for text in [*STORIES, "  a  b ", "\n\nTim", "\u2028é👍🏽"]:
        assert made.decode(made.encode(text)) == text
    assert {"\n", "1", "2"} <= set(made.encode(STORIES[0], out_type=str))
    assert made.encode("Tim", out_type=str)[0][0] == "T"
    assert "\u2581dog" in made.encode(STORIES[1], out_type=str)  # long lines are learned from


def test_the_command_line_of_training(train, folder: Path, monkeypatch):
    """What reaches `train`: files as often as named, sizes, seed, score of the held-out text."""
    given = {}

    def remember(config, documents, out, **settings) -> None:
        given.update(settings, config=config, documents=documents, out=out)

    monkeypatch.setattr(train, "train", remember)
    (folder / "cut").mkdir()  # a file in another folder may have the same name
    b, cut = str(folder / "b.txt"), str((folder / "cut.txt").rename(folder / "cut" / "b.txt"))
    assert train.main(command(folder, b, b, "--tails", cut, "--heldout", b, "--seed", "7",
                              "--learning-rate", "0.5", "--weight-decay", "0.25", "--dtype",
                              "float32", "--keep-every", "9")) == 0
    tokenizer = train.load_tokenizer(folder / "t.model")
    expected = [[1, *tokenizer.encode(text), 2] for text in STORIES + 2 * STORIES[1:]]
    assert [ids.tolist() for ids in given["documents"]] == expected
    assert [ids.tolist() for ids in given["pieces"]] == [[0, *tokenizer.encode(STORIES[0]), 2]]
    assert given["config"] == DecoderConfig(300, **json.loads(SIZES))
    names = ("tokens", "batch", "seed", "learning_rate", "weight_decay", "dtype", "keep_every",
             "cut", "resume", "initial", "facts")
    assert [given[name] for name in names] == [
        128, 2, 7, 0.5, 0.25, "float32", 9, 0, False, None,
        {"files": {"a.txt": 1, "b.txt": 3}, "init": None}]
    model = Decoder(given["config"]).eval()
    assert given["evaluate"](model) == train.bits_per_byte(model, tokenizer, STORIES[1:])
    before = (folder / "t.model").read_bytes()
    (folder / "out.pt.state").touch()
    save_checkpoint(folder / "first.pt", model)
    init = [x for x in command(folder, "--init", str(folder / "first.pt"), "--resume",
                               "--weight-decay", "0")
            if x not in ("--sizes", SIZES)]
    assert train.main(init) == 0 and given["resume"] and given["evaluate"] is None
    assert given["weight_decay"] == 0
    assert (folder / "t.model").read_bytes() == before
    assert_same_weights(given["initial"], model)


def test_a_run_from_the_command_line(train, folder: Path, monkeypatch):
    """Interrupted after the first of two steps, resumed; then on from its weights."""
    monkeypatch.setattr(train, "SAVE_SECONDS", 0)
    save = train.save_atomically

    def save_and_stop(path: Path, content: memoryview) -> None:
        save(path, content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train, "save_atomically", save_and_stop)
        assert train.main(command(folder)) == 1
    assert train.main(command(folder, "--resume", "--heldout", str(folder / "b.txt"))) == 0
    first, out = load_checkpoint(folder / "out.pt"), folder / "second.pt"
    rows = lines_of(folder / "out.pt.jsonl")
    assert [row["step"] for row in rows] == [2]
    tokenizer = train.load_tokenizer(folder / "t.model")
    score = train.bits_per_byte(first, tokenizer, STORIES[1:])
    facts = content_of(folder / "out.pt")["facts"]
    assert rows[0]["bits_per_byte"] == facts["bits_per_byte"] == score
    arguments = ["--init", str(folder / "out.pt"), "--learning-rate", "1e-12", "--keep-every", "64",
                 "--out", str(out)]
    arguments = [x for x in command(folder, *arguments) if x not in ("--sizes", SIZES)]
    assert train.main(arguments) == 0
    for name in ("second.pt", "second-64.pt", "second-128.pt"):  # so slow that nothing moved
        assert_same_weights(load_checkpoint(folder / name), first)
        facts = content_of(folder / name)["facts"]
        assert facts["tokens"] == (64 if "64" in name else 128) and facts["init"] == "out.pt"
    out.rename(folder / "third.pt")
    Path(f"{out}.jsonl").unlink()
    before = (folder / "second-64.pt").read_bytes()
    assert train.main(arguments) == 1  # what an earlier run kept stays
    assert (folder / "second-64.pt").read_bytes() == before and not out.exists()


@pytest.mark.parametrize("saved", [True, False])
def test_an_interrupted_run_says_what_can_be_resumed(
    saved: bool, train, folder: Path, monkeypatch, capsys
):
    monkeypatch.setattr(train, "SAVE_SECONDS", 0 if saved else 1000)
    step, calls = torch.optim.AdamW.step, []

    def stop(optimizer) -> None:
        calls.append(optimizer)
        if len(calls) == 3:  # two a step
            raise KeyboardInterrupt
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", stop)
    assert train.main(command(folder, "--dtype", "float32")) == 1
    then = "--resume goes on from the last saved state" if saved else "no state was saved yet"
    assert capsys.readouterr().err.splitlines()[-1] == f"train.py: interrupted; {then}"
    assert (folder / "out.pt.state").exists() == saved


def test_a_closed_stderr_does_not_end_the_training(train, folder: Path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", MagicMock(write=MagicMock(side_effect=BrokenPipeError)))
        assert train.main(command(folder)) == 0
    assert (folder / "out.pt").exists()


def other_tokenizer(path: Path, **settings) -> None:
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(STORIES), model_writer=made, vocab_size=300, minloglevel=2,
        hard_vocab_limit=False, **{"byte_fallback": True, **settings})
    path.write_bytes(made.getvalue())


@pytest.mark.parametrize("prepare, more, fault", [
    (None, ["--out", "{}/none/out.pt"], "in the folder of {}/none/out.pt: No such file or "),
    (None, ["--out", "/proc/out.pt"], "cannot write in the folder of /proc/out.pt: "),
    (None, ["--tokenizer", "{}/none/t.model"], "cannot write in the folder of {}/none/t.model: "),
    (lambda f: (f / "out.pt").symlink_to("none/out.pt"), [], "{}/out.pt exists: "),
    (None, ["--resume"], "{}/out.pt.state does not exist: there is nothing to resume"),
    (lambda f: (f / "out.pt.state").touch(), ["--resume"], "{}/out.pt.state is damaged, or no "),
    (lambda f: torch.save({"step": 3}, f / "out.pt.state"), ["--resume"], "state is damaged"),
    (lambda f: (f / "b.txt").write_bytes(b"caf\xe9"), ["{}/b.txt"], "{}/b.txt is not UTF-8: "),
    (lambda f: (f / "b.txt").write_text("\n<|endoftext|>\n \n"), ["--heldout", "{}/b.txt"],
     "{}/b.txt holds no text"),
    (None, ["{}/none.txt"], "No such file or directory: '{}/none.txt'"),
    (None, ["--vocab-size", "8192"], "no tokenizer of 8192 pieces from this text: "),
    (lambda f: (f / "t.model").write_text("x"), [], "{}/t.model is not a sentencepiece model"),
    (lambda f: other_tokenizer(f / "t.model", bos_id=-1), [], "t.model has no beginning-of-"),
    (lambda f: other_tokenizer(f / "t.model", eos_id=-1), [], "t.model has no end-of-text "),
    (lambda f: other_tokenizer(f / "t.model", byte_fallback=False), [], "has no byte fallback"),
    (lambda f: (f / "t.model").write_bytes((HERE / "checkpoints/tokenizer.model").read_bytes()), [],
     "{}/t.model has 8192 tokens, not 300"),
    (None, ["--batch", "1000"], "sequences of 32 tokens in the text, expected 1000"),
    (None, ["--init", "{}/a.txt", "--sizes", "{{}}"], "checkpoint {}/a.txt: "),
    (lambda f: save_checkpoint(f / "i.pt", Decoder(TINY)),
     ["--init", "{}/i.pt", "--sizes", "{{}}"], "{}/t.model"),  # another would not fit its weights
    (lambda f: save_checkpoint(f / "i.pt", Decoder(TINY)),
     ["--init", "{}/i.pt", "--sizes", "{{}}", "--tokenizer", f"{HERE}/checkpoints/tokenizer.model"],
     "{}/i.pt has 61 tokens, the tokenizer 8192"),
])
def test_a_fault_in_training_is_one_line(prepare, more, fault, train, folder: Path, capfd):
    if prepare:
        prepare(folder)
    assert train.main(command(folder, *(word.format(folder) for word in more))) == 1
    error = capfd.readouterr().err
    assert fault.format(folder) in error.splitlines()[-1] and "Traceback" not in error
    assert error.splitlines()[-1].startswith("train.py: ")
    assert not (folder / "out.pt").exists() and not (folder / "out.pt.jsonl").exists()


@pytest.mark.parametrize("more", [
    "--tokens 0", "--batch 0", "--vocab-size 0", "--learning-rate nan", "--learning-rate inf",
    "--weight-decay -1", "--keep-every -1", "--seed -1",
    "--dtype float16", "--sizes [1]", '--sizes {"x":1}',
    '--sizes {"n_layers":0}', "--sizes n_layers", "--init a.pt",
])
def test_wrong_arguments_of_training_exit_with_2(more: str, train, folder: Path, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(command(folder, *more.split()))
    assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:  # no checkpoint is written unless one is named
        train.main([str(folder / "a.txt"), "--tokens", "128"])
    assert stop.value.code == 2


def test_bits_per_byte(train, tokenizer):
    """Against the loops: padding, several groups, byte tokens, a document that is cut."""
    model = Decoder(replace(TINY, vocab_size=8192, context_length=16)).eval()
    with torch.no_grad():
        model.token_embedding.weight.mul_(20)
    stories = ["One day.", "a", "Tim saw a big red ball. " * 9, "héé 👍🏽\n\n", "  x", *"bcdefgh"]
    bits, size = 0.0, 0
    for story in stories:
        ids = [1, *tokenizer.encode(story), 2][:17]
        for row, target in zip(reference_logits(model, ids[:-1]), ids[1:]):
            bits += math.log2(sum(np.exp(row - row[target])))
        covered = story if ids[-1] == 2 else tokenizer.decode(ids)
        size += len(covered.encode())
    assert train.bits_per_byte(model, tokenizer, stories) == pytest.approx(bits / size, rel=1e-6)


# The choice of a checkpoint ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def choose() -> ModuleType:
    sys.path.insert(0, str(HERE / "checkpoints"))
    return script("scripts/choose_checkpoint.py")


def test_a_shift_is_at_most_half_a_float16_step(choose):
    values = torch.tensor([1.0, -1.999, 2.0, 0.3, -1000.0, 3e-5, 1e-7, 0.0]).repeat(4000, 1)
    torch.manual_seed(0)
    shifts = choose.shift(None, (), values.double()) - values.double()
    steps = torch.tensor([2.0**-10, 2.0**-10, 2.0**-9, 2.0**-12, 0.5, 2.0**-24, 2.0**-24, 2.0**-24])
    largest = shifts.abs().max(dim=0).values / steps
    assert ((largest > 0.49) & (largest <= 0.5)).all()
    assert (shifts.mean(dim=0).abs() / steps < 0.02).all()


def test_averages_of_checkpoints(choose):
    torch.manual_seed(0)
    models = [Decoder(TINY) for _ in range(3)]
    mean = choose.average(models, [1, 2, 3])
    for name, weight in mean.named_parameters():
        parts = [dict(model.named_parameters())[name].detach().double() for model in models]
        expected = (parts[0] + 2 * parts[1] + 3 * parts[2]) / 6
        assert torch.equal(weight, weight.half().float())
        assert torch.allclose(weight.double(), expected, rtol=1e-3, atol=1e-6)


def test_what_is_sure_in_float16(choose, monkeypatch):
    """A wide margin survives every pass; a tie parts in some."""
    torch.manual_seed(1)
    model = Decoder(replace(TINY, dropout=0.0)).eval()
    with torch.no_grad():
        model.token_embedding.weight.mul_(40)
    model = model.half().float()
    before = model(torch.tensor([[1, 2, 3]]))
    gap, different, equal, same = choose.examine(model, 1)
    assert torch.equal(model(torch.tensor([[1, 2, 3]])), before)  # nothing is shifted any more
    text = model.generate(torch.tensor([[1]]), 8)[0].tolist()
    rows = np.sort(reference_logits(model, text[:-1]), axis=-1)
    assert gap == pytest.approx(min(rows[:, -1] - rows[:, -2]), abs=1e-4)
    assert different == len(set(text[1:])) and equal and same == 20 and gap > 0.1
    monkeypatch.setattr(choose, "DIFFERENT", different)
    assert choose.is_sure(model, 1)
    monkeypatch.setattr(choose, "DIFFERENT", different + 1)
    assert not choose.is_sure(model, 1)
    monkeypatch.setattr(choose, "DIFFERENT", different)
    with torch.no_grad():  # another token's embedding a hair away: nearly the same logits
        model.token_embedding.weight[60] = model.token_embedding.weight[text[1]] * (1 - 1e-6)
    gap, _, _, same = choose.examine(model, 1)
    assert gap < 1e-3 and 0 <= same < 20 and not choose.is_sure(model, 1)
    after = torch.rand(1)
    choose.examine(model, 1)
    assert torch.equal(torch.rand(1), after)  # the same passes each time
    shifted = set()
    monkeypatch.setattr(choose, "shift", lambda layer, *_: shifted.add(layer))
    choose.examine(model, 1)
    assert shifted == {layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)}


def test_the_best_that_fits_is_chosen(choose, tmp_path: Path, monkeypatch, capsys):
    config = replace(TINY, vocab_size=8192, dropout=0.0)
    for seed in range(2):
        torch.manual_seed(seed)
        save_checkpoint(tmp_path / f"{seed}.pt", Decoder(config), tokens=9)
    (tmp_path / "text.txt").write_text("One day")
    scores = iter([0.71, 0.7, 0.702, 0.8])

    def score(model: Decoder, *_) -> float:  # what is shipped is what is scored
        assert all(torch.equal(weight, weight.half().float()) for weight in model.parameters())
        return next(scores)

    monkeypatch.setattr(choose, "bits_per_byte", score)
    asked = iter([(0.02, 150, True, 20), (0.03, 120, True, 20)])  # of the second, then of the mean
    monkeypatch.setattr(choose, "examine", lambda *_: next(asked))
    arguments = [str(tmp_path / name) for name in ("0.pt", "1.pt")]
    arguments += ["--heldout", str(tmp_path / "text.txt")]
    assert choose.main([*arguments, "--out", str(tmp_path / "out.pt")]) == 0
    table = [line.split(" | ")[:3] for line in capsys.readouterr().out.splitlines()[2:6]]
    assert table == [["| 1", "0.7000", "0.0200"], ["| mean of the last 2", "0.7020", "0.0300"],
                     ["| 0", "0.7100", ""], ["| rising mean of the last 2", "0.8000", ""]]
    content = content_of(tmp_path / "out.pt")
    assert content["facts"] == {"tokens": 9, "bits_per_byte": 0.702, "chosen": "mean of the last 2"}
    models = [load_checkpoint(tmp_path / f"{seed}.pt") for seed in range(2)]
    assert_same_weights(load_checkpoint(tmp_path / "out.pt"), choose.average(models, [1, 1]))
    for unfit in ((0.029, 120, True, 20), (0.5, 119, True, 20), (0.5, 200, False, 20),
                  (0.5, 200, True, 19)):
        scores, asked = iter([0.7, 0.8, 0.9, 0.9]), iter([unfit])
        assert choose.main(arguments) == 1
        assert capsys.readouterr().err.splitlines()[-1] == "choose_checkpoint.py: no candidate fits"
    sure = iter([False, True, False])  # of three random averages
    monkeypatch.setattr(choose, "is_sure", lambda *_: next(sure))
    scores, asked = iter([0.9, 0.9, 0.9, 0.9, 0.7]), iter([(0.03, 120, True, 20)])
    assert choose.main([*arguments, "--random", "3"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"chosen: mean of [1-9] x [01]", out)
    assert err.splitlines()[1] == "random average 2 of 3 is sure"
    monkeypatch.setattr(choose, "bits_per_byte", MagicMock(side_effect=KeyboardInterrupt))
    assert choose.main(arguments) == 1
    assert capsys.readouterr().err.splitlines()[1:] == [
        "choose_checkpoint.py: interrupted; nothing was written"]


def test_the_candidates_of_three_checkpoints(choose, tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("One day")
    paths = [tmp_path / f"{value}.pt" for value in (1, 2, 4)]
    for path in paths:
        model = Decoder(replace(TINY, vocab_size=8192))
        torch.nn.init.constant_(model.final_norm.weight, float(path.stem))
        save_checkpoint(path, model, tokens=int(path.stem))
    monkeypatch.setattr(choose, "bits_per_byte",
                        lambda model, *_: model.final_norm.weight[0].item())
    monkeypatch.setattr(choose, "examine", lambda *_: (1.0, 200, True, 20))
    out = tmp_path / "out.pt"
    arguments = [*map(str, paths), "--heldout", str(tmp_path / "text.txt"), "--out", str(out)]
    assert choose.main(arguments) == 0
    table = dict(line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()[2:9])
    assert table == {
        "| 1": "1.0000", "| 2": "2.0000", "| 4": "4.0000", "| mean of the last 2": "3.0000",
        "| rising mean of the last 2": "3.3340", "| mean of the last 3": "2.3340",
        "| rising mean of the last 3": "2.8340"}
    assert content_of(out)["facts"] == {"tokens": 4, "bits_per_byte": 1.0, "chosen": "1"}


@pytest.mark.parametrize("more, fault", [
    (["{}/more/a.pt"], "two checkpoints are named a"),
    (["{}/more/none.pt"], "No such file or directory: '{}/more/none.pt'"),
    (["{}/a.txt"], "checkpoint {}/a.txt: "),
    (["--tokenizer", "{}/t.model"], "the checkpoints have 8192 tokens, the tokenizer 300"),
    (["--heldout", "{}/more"], "Is a directory: '{}/more'"),
    (["--out", "{}/none/out.pt"], "cannot write in the folder of {}/none/out.pt: No such file"),
    (["--out", "{}/more"], "{}/more exists: move it away first"),
])
def test_a_fault_in_the_choice_is_one_line(
    more: list[str], fault: str, train, choose, folder: Path, monkeypatch, capfd
):
    """What is wrong with a name is said before anything is measured."""
    monkeypatch.setattr(choose, "bits_per_byte", MagicMock(side_effect=AssertionError))
    train.train_tokenizer(STORIES, folder / "t.model", 300)
    (folder / "more").mkdir()
    for name in ("a.pt", "more/a.pt"):
        save_checkpoint(folder / name, Decoder(replace(TINY, vocab_size=8192)))
    given = ["--heldout", "{}/a.txt", "{}/a.pt", *more]
    assert choose.main([word.format(folder) for word in given]) == 1
    error = capfd.readouterr().err
    assert fault.format(folder) in error.splitlines()[-1] and "Traceback" not in error
    assert error.splitlines()[-1].startswith("choose_checkpoint.py: ")
    assert not (folder / "out.pt").exists()


def test_a_model_too_large_for_float16_is_one_line(choose, folder: Path, capfd):
    model = Decoder(replace(TINY, vocab_size=8192))
    with torch.no_grad():
        model.blocks[0].feed_forward.up.weight.fill_(6e4)
        model.blocks[0].feed_forward.down.weight.fill_(6e4)
    save_checkpoint(folder / "a.pt", model)
    assert choose.main([str(folder / "a.pt"), "--heldout", str(folder / "a.txt")]) == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith("choose_checkpoint.py: logits are ")


def test_a_negative_number_of_averages_exits_with_2(choose, folder: Path):
    with pytest.raises(SystemExit) as stop:
        choose.main(["a.pt", "--heldout", str(folder / "a.txt"), "--random", "-1"])
    assert stop.value.code == 2


# Report ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def report() -> ModuleType:
    return script("scripts/report.py")


def a_row(**changes) -> dict:
    """A row as the cache stage writes it, with timings that are easy to work out."""
    return {
        "type": "cache_benchmark", "length": 64, "naive_seconds": [2.0, 1.0, 4.0],
        "cached_seconds": [0.5, 0.25, 0.64], "naive_tokens_per_second": 32.0,
        "cached_tokens_per_second": 128.0, "speedup": 4.0, "cache_bytes": 524288,
        "greedy_equal": True, "checkpoint_sha256": "ab" * 32, "device": "cpu",
        "dtype": "torch.float32", "hardware": "Abacus", "python": "3.11.7", "pytorch": "2.13.0",
        "threads": 2, "weight_bytes": 10**8, "time": "2026-11-29T12:00:00+00:00", **changes,
    }


def parted_row(**changes) -> dict:
    return a_row(greedy_equal=False, first_difference=3, tokens=[5, 6], gap=0.5,
                 max_logit_difference=0.25, **changes)


def write_rows(path: Path, *rows: object, end: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end, encoding="utf-8")
    return path


def cells_of(table: str) -> list[list[str]]:
    """The cells of the Markdown table that opens the text, without the line of dashes."""
    lines = table.partition("\n\n")[0].split("\n")
    assert set(lines.pop(1)) <= set("|-: ")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_report_of_good_rows(report, tmp_path: Path, capsys):
    path = write_rows(tmp_path / "a.jsonl", a_row(), a_row(
        length=512, naive_seconds=[51.2, 64.0], naive_tokens_per_second=8.889,
        cached_seconds=[0.5, 0.4], cached_tokens_per_second=1137.8, speedup=128.0,
        cache_bytes=4194304))
    assert report.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert cells_of(out) == [
        ["length", "naive tok/s", "cached tok/s", "GB/s", "speedup", "bytes", "equal"],
        ["64", "32.0 [16-64]", "128 [100-256]", "12.8", "4.00x", "524,288", "yes"],
        ["512", "8.9 [8.0-10.0]", "1138 [1024-1280]", "113.8", "128.00x", "4,194,304", "yes"]]
    assert max(map(len, out.splitlines())) <= 80
    assert " ".join(out.split()).endswith(
        "Shared: hardware Abacus, device cpu, dtype float32, threads 2, pytorch 2.13.0, "
        "python 3.11.7, checkpoint_sha256 abababababab.")


def test_the_report_of_mixed_and_failing_rows(report, tmp_path: Path, capsys):
    """What differs leads the table, and a row whose tokens parted shows no speed."""
    first = write_rows(tmp_path / "a.jsonl", a_row(), parted_row(dtype="torch.float16"))
    second = write_rows(tmp_path / "b.jsonl", a_row(hardware="Loom", dtype="torch.bfloat16"))
    assert report.main([str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert [line[:3] + line[4:5] + line[6:] for line in cells_of(out)] == [
        ["hardware", "dtype", "length", "cached tok/s", "speedup", "bytes", "equal"],
        ["Abacus", "float32", "64", "128 [100-256]", "4.00x", "524,288", "yes"],
        ["Abacus", "float16", "64", "-", "-", "524,288", "no"],
        ["Loom", "bfloat16", "64", "128 [100-256]", "4.00x", "524,288", "yes"]]
    assert "hardware" not in out.partition("\n\n")[2]


@pytest.mark.parametrize("second, changes, telling", [
    ("b.jsonl", {"dtype": "torch.float16"}, ["dtype"]),
    ("b.jsonl", {"hardware": "Loom", "threads": 8}, ["hardware", "threads"]),
    ("b.jsonl", {"pytorch": "2.14.0"}, ["pytorch"]),
    ("b.jsonl", {}, ["file"]),
    ("c/a.jsonl", {}, ["file"]),
])
def test_the_report_tells_files_apart(
    report, second: str, changes: dict, telling: list[str], tmp_path: Path, monkeypatch, capsys
):
    """By what differs between them, else by the name; a name that both have, by the path."""
    monkeypatch.chdir(tmp_path)
    Path("c").mkdir()
    paths = [write_rows(Path("a.jsonl"), a_row()), write_rows(Path(second), a_row(**changes))]
    rows = [a_row(file="a.jsonl"), a_row(file=second, **changes)]
    assert report.main(list(map(str, paths))) == 0
    table = cells_of(capsys.readouterr().out)
    count = len(telling)
    assert [line[:count] for line in table] == [
        telling, *([str(row[name]).removeprefix("torch.") for name in telling] for row in rows)]
    assert table[0][count] == "length"


def test_a_file_given_twice(report, tmp_path: Path, capsys):
    path = str(write_rows(tmp_path / "a.jsonl", a_row()))
    assert report.main([path, path]) == 1
    assert "twice" in capsys.readouterr().err


def drawn(report, paths: list[Path], monkeypatch) -> tuple[set, set, list[tuple]]:
    """What `report.py --plot` gives to matplotlib: the lines of either panel, and the legend.

    A line is (colour, style, marker, hollow, points); a key is (label, colour, style, hollow).
    """
    library, panels = MagicMock(), (MagicMock(), MagicMock())
    figure = library.figure.Figure.return_value
    figure.subplots.return_value = panels
    library.lines.Line2D = lambda x, y, **style: SimpleNamespace(
        get_label=lambda: style["label"], style=style)
    for name in ("", ".figure", ".lines"):
        module = getattr(library, name[1:]) if name else library
        monkeypatch.setitem(sys.modules, f"matplotlib{name}", module)
    assert report.main([*map(str, paths), "--plot", "some.png"]) == 0
    figure.savefig.assert_called_once_with(Path("some.png"), dpi=ANY)
    lines = [{(call.kwargs["color"], call.kwargs.get("linestyle"), call.kwargs.get("marker", ""),
               call.kwargs.get("fillstyle") == "none", tuple(zip(*call.args)))
              for call in panel.plot.call_args_list} for panel in panels]
    keys = [(key.style["label"], key.style.get("color"), key.style["linestyle"],
             key.style.get("fillstyle") == "none")
            for key in figure.legend.call_args.kwargs["handles"]]
    return *lines, keys


def test_the_picture_of_one_file(report, tmp_path: Path, monkeypatch):
    """Tokens per second and MiB; the rows in the order of their length."""
    path = write_rows(tmp_path / "a.jsonl", a_row(length=128, cache_bytes=2**20), a_row())
    speed, size, keys = drawn(report, [path], monkeypatch)
    short, long = {32.0, 64.0, 16.0}, {64.0, 128.0, 32.0}
    assert len(speed) == 4 and {line[0] for line in speed} == {"C0"}
    points = {line[1:4]: line[4] for line in speed}
    assert set(points["none", "o", True]) == {
        *((64, rate) for rate in short), *((128, rate) for rate in long)}
    assert set(points["none", "o", False]) == {
        (64, 128), (64, 256), (64, 100), (128, 256), (128, 512), (128, 200)}
    assert points["--", "", True] == ((64, 32.0), (128, 32.0))
    assert points["-", "", False] == ((64, 128.0), (128, 128.0))
    assert size == {("C0", "none", "o", True, ((64, 0.5), (128, 1.0))),
                    ("#777777", "-", "", False, ((0, 0), (128, 1.0)))}
    assert keys == [("cached", "#222222", "-", False), ("naive", "#222222", "--", True),
                    ("formula: 8,192 bytes a token", "#777777", "-", False)]


def test_the_picture_of_several_files(report, tmp_path: Path, monkeypatch):
    """A line for each source, none through two of them; no speed where the tokens differ."""
    half = {"dtype": "torch.float16", "cache_bytes": 262144}
    paths = [write_rows(tmp_path / "a.jsonl", a_row(), parted_row(length=128, cache_bytes=2**20)),
             write_rows(tmp_path / "b.jsonl", a_row(**half)),
             write_rows(tmp_path / "c.jsonl", parted_row(pytorch="2.14.0", **half))]
    speed, size, keys = drawn(report, paths, monkeypatch)
    medians = {(color, style): points for color, style, marker, _, points in speed if not marker}
    assert medians == {("C0", "-"): ((64, 128.0),), ("C0", "--"): ((64, 32.0),),
                       ("C1", "-"): ((64, 128.0),), ("C1", "--"): ((64, 32.0),),
                       ("C2", "-"): (), ("C2", "--"): ()}
    assert {length for *_, points in speed for length, _ in points} == {64}
    assert {(color, style, points) for color, style, _, _, points in size} == {
        ("C0", "none", ((64, 0.5), (128, 1.0))), ("C1", "none", ((64, 0.25),)),
        ("C2", "none", ((64, 0.25),)),
        ("#777777", "-", ((0, 0), (128, 1.0))), ("#777777", "-.", ((0, 0), (64, 0.25)))}
    assert [key[:2] for key in keys] == [
        ("float32, a.jsonl", "C0"), ("float16, b.jsonl", "C1"), ("float16, c.jsonl", "C2"),
        (" ", None), ("cached", "#222222"), ("naive", "#222222"),
        ("formula: 8,192 bytes a token", "#777777"), ("formula: 4,096 bytes a token", "#777777")]


def test_a_torn_last_line_is_named_and_skipped(report, tmp_path: Path, capsys):
    """But not one that lacks nothing but its newline."""
    whole = json.dumps(a_row())
    path = write_rows(tmp_path / "a.jsonl", a_row(), end=whole[:-9])
    assert report.main([str(path)]) == 0
    captured = capsys.readouterr()
    assert len(cells_of(captured.out)) == 2
    assert captured.err.count("\n") == 1 and f"{path}, line 2 is torn" in captured.err
    assert report.main([str(write_rows(path, a_row(), end=whole))]) == 0
    captured = capsys.readouterr()
    assert len(cells_of(captured.out)) == 3 and captured.err == ""


@pytest.mark.parametrize("content", [
    b"", b"\n", b"hello\n", b"[1]\n", b'{"type": "evaluation"}\n', b"\xff\xfe\n",
    json.dumps(a_row(naive_seconds=[])).encode() + b"\n",
    json.dumps(a_row(speedup=0)).encode() + b"\n",
    json.dumps(a_row(type="evaluation")).encode() + b"\n",
    json.dumps(a_row(cached_seconds=["1"])).encode() + b"\n",
    json.dumps(a_row(dtype="torch.float33")).encode() + b"\n",
    json.dumps(a_row(dtype=math.nan)).encode() + b"\n",
    json.dumps(a_row(hardware=["Abacus"])).encode() + b"\n",
    json.dumps(a_row(length=10**400)).encode() + b"\n",
    b"[" * 10**6 + b"\n",
    json.dumps(a_row()).encode() + b"\n\n" + json.dumps(a_row()).encode() + b"\n",
    json.dumps({name: value for name, value in a_row().items() if name != "threads"}).encode(),
], ids=range(17))
def test_a_file_of_something_else(report, content: bytes, tmp_path: Path, capsys):
    (tmp_path / "odd.jsonl").write_bytes(content)
    assert report.main([str(tmp_path / "odd.jsonl")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "odd.jsonl" in captured.err.splitlines()[-1]


def test_a_missing_file_and_a_missing_matplotlib(report, tmp_path: Path, monkeypatch, capsys):
    assert report.main([str(tmp_path / "none.jsonl")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    path = write_rows(tmp_path / "a.jsonl", a_row())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main([str(path), "--plot", str(tmp_path / "a.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        report.main([str(path), "--plot", str(tmp_path / "a.txt")])


# Page --------------------------------------------------------------------------------------------


def test_the_page_holds_the_models_sentence(trained: Decoder, greedy, tokenizer):
    page = (HERE / "docs" / "kv-cache.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    ids = greedy[0][0, 1 : len(data["tokens"])].tolist()
    pieces = [tokenizer.id_to_piece(token).replace("\u2581", " ") for token in ids]
    assert len(pieces) >= 22 and data["tokens"] == ["BOS", *pieces]
    config = asdict(trained.config)
    assert data["config"].pop("bytes_per_element") == 2
    assert data["config"].pop("head_size") == trained.config.head_size
    assert len(data["config"]) == 3 and data["config"].items() <= config.items()
    rows = lines_of(HERE / "docs" / "cache-cpu.jsonl")
    assert data["measured"]["speedups"] == [
        {"length": row["length"], "speedup": round(row["speedup"], 2)} for row in rows]


# README ------------------------------------------------------------------------------------------


def test_the_readmes_table_is_that_of_its_rows():
    rows = lines_of(HERE / "docs" / "cache-cpu.jsonl")
    assert day5.markdown_table(rows) in (HERE / "README.md").read_text(encoding="utf-8")
    assert {row["checkpoint_sha256"] for row in rows} == {
        hashlib.sha256(CHECKPOINT.read_bytes()).hexdigest()}


def test_is_causal_aligns_its_triangle_to_the_upper_left():
    """As README and the page say, so that it cannot serve an update of three tokens on five."""
    query, key, value = (torch.randn(1, 1, rows, 4, dtype=torch.float64) for rows in (3, 8, 8))
    upper_left = torch.arange(8) <= torch.arange(3)[:, None]
    assert_near(F.scaled_dot_product_attention(query, key, value, upper_left),
                F.scaled_dot_product_attention(query, key, value, is_causal=True), 1e-12)


README = (HERE / "README.md").read_text(encoding="utf-8")


def readme_code(section: str) -> list[str]:
    """The Python blocks of one section of README, in order."""
    section = re.search(rf"^## {section}$(.*?)^## ", README, re.MULTILINE | re.DOTALL)[1]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def run_as_written(code: str, names: dict, capsys) -> tuple[list[str], list[str]]:
    """What the code prints, and what the comments at and below its prints say that it does."""
    capsys.readouterr()
    exec(code, names)
    said = re.findall(r"^print\(.*\)(?:  |\n)# (.*)", code, re.MULTILINE)
    return capsys.readouterr().out.splitlines(), said


@pytest.fixture
def clone(tmp_path: Path, monkeypatch) -> None:
    """A folder in which README's paths are right, and in which its code may write."""
    (tmp_path / "checkpoints").symlink_to(HERE / "checkpoints")
    monkeypatch.chdir(tmp_path)


def test_the_readmes_code_for_the_shipped_model(clone, tokenizer, monkeypatch, capsys):
    """Each story is checked by one full pass over it, sampled from with the same generator."""
    story, half, chat = readme_code("Try it")
    calls = []

    def record(model: Decoder, ids: Tensor, count: int, cached: bool = True, **sampling) -> list:
        seed = sampling.pop("generator").initial_seed()
        calls.append((ids.tolist(), count, cached, seed, sampling))
        return [torch.tensor([[tokenizer.eos_id()]])]

    with monkeypatch.context() as patch:  # the command line asks for the same
        patch.setattr(Decoder, "stream", record)
        command = re.search(r"^python (day5.py generate .*)$", README, re.MULTILINE)[1]
        day5.main([*shlex.split(command)[1:], "--device", "cpu"])
        run_as_written(story, {}, capsys)
    assert calls[0] == calls[1]

    def sampled_again(text: list[int], start: int, generator: torch.Generator) -> list[int]:
        rows = names["model"](torch.tensor([text]))[0, start - 1 : -1].split(1)
        return [octlm.sample(row, 0.8, 40, generator).item() for row in rows]

    names: dict = {}
    printed, said = run_as_written(story, names, capsys)
    ids, start, end = names["ids"], len(calls[0][0][0]), [tokenizer.eos_id()]
    whole = ids if len(ids) == start + 200 else ids + end
    assert len(ids) > start + 20 and end[0] not in ids
    assert whole[start:] == sampled_again(whole, start, seeded(0))
    assert printed == tokenizer.decode(ids).splitlines() and said == []
    printed, said = run_as_written(half, names, capsys)
    assert printed == said and len(said) == 1

    generator = names["generator"].clone_state()
    printed, said = run_as_written(chat, names, capsys)
    text, start, replies = names["text"], 1, []
    for turn in ("Lily had a red ball.", "Then a dog came."):
        ids = tokenizer.encode(turn)
        assert text[start : start + len(ids)] == ids
        start += len(ids)
        made = text[start : start + 30]
        made = made[: made.index(tokenizer.eos_id()) + 1] if tokenizer.eos_id() in made else made
        assert made == sampled_again(text[: start + len(made)], start, generator)
        start += len(made)
        replies += tokenizer.decode(made).splitlines()
    assert (printed, said, start) == (replies, [], len(text))


def test_the_readmes_chat_in_a_full_context(clone, tokenizer, capsys):
    chat = readme_code("Try it")[2]
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(
        vocab_size=8192, context_length=24, n_layers=1, d_model=32, d_ff=16)).eval()
    names = {"torch": torch, "tokenizer": tokenizer, "model": model, "generator": seeded(0)}
    run_as_written(chat, names, capsys)
    text, held = names["text"], names["cache"][0][0].shape[2]
    assert held == len(text) - 1 <= 24
    logits = model.forward_cached(torch.tensor([text[:-1]]))[0][:, -1]
    assert_near(names["logits"][:, -1], logits, 1e-5)


def test_the_readmes_code_for_a_model_of_ones_own(clone, capsys):
    names: dict = {}
    for code in readme_code("Copy it"):
        printed, said = run_as_written(code, names, capsys)
        assert printed == said and len(said) == code.count("print(")
    share, kept = names["share"][0], names["logits"][0].isfinite()
    nucleus = int((share.cumsum(dim=0) <= 0.9).sum()) + 1  # as many as it takes to pass 0.9
    assert set(kept.nonzero()[:, 0].tolist()) == set(names["order"][0, :nucleus].tolist())


# Every script ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, defaults", [
    ("cache", {"lengths": "64 256 512", "repeats": 3}),
    ("generate", {"prompt": "Once upon a time", "tokens": 200, "temperature": 0.8, "top-k": 40,
                  "seed": 0}),
])
def test_help_shows_the_defaults(stage: str, defaults: dict, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")  # paths are not broken into two lines
    run = Run(capsys, stage, "--help")
    parts = [part.split() for part in run.out.partition("options:")[2].split("  --")]
    options = {name: " ".join(rest) for name, *rest in parts}
    defaults = defaults | {"checkpoint": CHECKPOINT, "tokenizer": TOKENIZER, "device": "auto",
                           "dtype": "auto", "threads": "PyTorch's choice"}
    for name, value in defaults.items():
        assert options[name].endswith(f"(default: {value})"), name


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt, also in tests run in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name, owner, function", [
    ("report.py rows.jsonl", Path, "read_text"), ("where_time_goes.py", octlm, "load_checkpoint"),
    ("half_precision.py", octlm, "load_checkpoint"), ("break_it.py", shutil, "copytree"),
])
def test_an_interrupted_script_ends_in_one_line(
    name: str, owner, function: str, ctrl_c, monkeypatch
):
    name, *arguments = name.split()
    monkeypatch.setattr(owner, function, lambda *args, **kwargs: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    with pytest.raises(SystemExit, match=rf"^{name}: interrupted$"):
        runpy.run_path(str(HERE / "scripts" / name), run_name="__main__")


def test_break_it_leaves_nothing_behind_when_killed(tmp_path: Path, monkeypatch):
    def kill(source: Path, folder: Path, **options) -> None:
        folder.mkdir()
        signal.raise_signal(signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "copytree", kill)
    signal.signal(signal.SIGTERM, lambda *args: None)  # without its own, the run goes on
    try:
        with pytest.raises(SystemExit, match="^break_it.py: killed$"):
            script("scripts/break_it.py").main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert list(tmp_path.iterdir()) == []


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare all paths on random small models.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first case's seed")
    args = parser.parse_args()
    near = 0
    for seed in range(args.seed, args.seed + args.cases):
        try:
            lines = check_random_case(seed)
        except BaseException:
            print(f"seed {seed} failed", file=sys.stderr)
            raise
        near += len(lines)
        print(*lines, sep="\n", end="\n" * bool(lines))
    print(f"{args.cases} cases from seed {args.seed}: all agree, {near} choices within rounding")


if __name__ == "__main__":
    main()
