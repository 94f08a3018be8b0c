"""Tests of octlm: every number against an independent reference or against the full pass.

The reference below is written from the formulas alone: one position, one head and one channel pair
at a time, in float64. The small models have weights large enough that attention is far from
uniform, so that a wrong mask or a wrong position moves the logits far beyond every tolerance.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import math
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor

import octlm
from octlm import Decoder, DecoderConfig, load_checkpoint, save_checkpoint

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE / "checkpoints" / "octlm-26m.pt"
TOKENIZER = HERE / "checkpoints" / "tokenizer.model"

SMALL = DecoderConfig(
    vocab_size=61, context_length=12, n_layers=2, n_heads=8, n_kv_heads=2, d_model=64, d_ff=48
)
HEADS = [{"n_kv_heads": n} for n in (1, 2, 4, 8)]
ROPES = [{"rope_base": base, "rope_scale": scale} for base, scale in ((50.0, 1.0), (1e4, 4.0), (500.0, 0.3))]
FORMS = [{**heads, "position": word} for heads in HEADS for word in ("rope", "learned")] + ROPES
WINDOWS = [
    {"attention_window": window, "kv_compress_block": block}
    for window, block in ((1, 0), (3, 0), (12, 0), (1, 1), (1, 2), (2, 5), (4, 3), (12, 2), (3, 20))
]  # fmt: skip


# Helpers


def small_model(seed: int = 0, **changes) -> Decoder:
    """A decoder in eval mode with weights of a trained one's size; no two of its heads agree."""
    torch.manual_seed(seed)
    model = Decoder(replace(SMALL, **changes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=1.5 / math.sqrt(weight.shape[1]))
    return model


def random_ids(batch: int, length: int, vocab_size: int = SMALL.vocab_size, seed: int = 1) -> Tensor:
    return torch.randint(vocab_size, (batch, length), generator=seeded(seed))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_near(actual: Tensor, expected, tolerance: float) -> None:
    """Every number within an absolute tolerance, and the same shape."""
    expected = torch.as_tensor(expected).to(actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """All 2 ** (total - 1) ways to cut `total` positions into chunks."""
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


def in_chunks(model: Decoder, ids: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The logits of all positions [B, T, vocab], by one cached call per chunk."""
    rows, cache = [], None
    for chunk in ids.split(lengths, dim=1):
        logits, cache = model.forward_cached(chunk, cache)
        rows.append(logits)
    return torch.cat(rows, dim=1)


def tensors_of(cache: octlm.Cache) -> list[Tensor]:
    return [tensor for entry in cache for tensor in entry]


def weights_of(model: Decoder) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def assert_same_weights(actual: Decoder, expected: dict[str, Tensor]) -> None:
    found = weights_of(actual)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert weight.dtype == expected[name].dtype and torch.equal(weight, expected[name]), name


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The reference: plain loops in float64


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


def reference_attend(i: int, query: np.ndarray, keys: list, values: list, config: DecoderConfig):
    """What one head sends to position i: query [D], keys and values a list of [D]."""
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
    config, state = model.config, model.state_dict()
    weights = {name: weight.double().numpy() for name, weight in state.items()}
    size, shared = config.d_model // config.n_heads, config.n_heads // config.n_kv_heads
    x = [weights["token_embedding.weight"][token] for token in token_ids]
    if config.position == "learned":
        x = [row + weights["position_embedding.weight"][i] for i, row in enumerate(x)]
    for layer in range(config.n_layers):
        part = {n.split(".", 2)[2]: w for n, w in weights.items() if n.startswith(f"blocks.{layer}.")}
        normed = [reference_norm(row, part["attention_norm.weight"], config.norm_eps) for row in x]
        query, key, value = (
            [(part[f"attention.{name}.weight"] @ row).reshape(-1, size) for row in normed]
            for name in ("query", "key", "value")
        )
        for i in range(len(x)):
            heads = []
            for h in range(config.n_heads):
                keys = [row[h // shared] for row in key]
                values = [row[h // shared] for row in value]
                heads.append(reference_attend(i, query[i][h], keys, values, config))
            x[i] = x[i] + part["attention.output.weight"] @ np.concatenate(heads)
            inner = reference_norm(x[i], part["feed_forward_norm.weight"], config.norm_eps)
            gate = part["feed_forward.gate.weight"] @ inner
            up = part["feed_forward.up.weight"] @ inner
            x[i] = x[i] + part["feed_forward.down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    last = weights["final_norm.weight"]
    return np.array(
        [weights["token_embedding.weight"] @ reference_norm(row, last, config.norm_eps) for row in x]
    )


# Config


def test_defaults_and_parameter_count():
    """The default model is the documented one, with the documented names and start values."""
    config = DecoderConfig(vocab_size=8192)
    assert asdict(config) == {
        "vocab_size": 8192, "context_length": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 2,
        "d_model": 512, "d_ff": 1368, "position": "rope", "rope_base": 10000.0, "rope_scale": 1.0,
        "attention": "sdpa", "attention_window": 0, "kv_compress_block": 0, "dropout": 0.0,
        "norm_eps": 1e-6,
    }  # fmt: skip
    assert config.head_size == 64
    model = Decoder(config)
    assert sum(weight.numel() for weight in model.parameters()) == 26_255_872
    inner = [
        "attention_norm", "attention.query", "attention.key", "attention.value", "attention.output",
        "feed_forward_norm", "feed_forward.gate", "feed_forward.up", "feed_forward.down",
    ]  # fmt: skip
    names = {f"blocks.{layer}.{name}.weight" for layer in range(8) for name in inner}
    ends = {"token_embedding.weight", "final_norm.weight", "lm_head.weight"}
    assert set(model.state_dict()) == names | ends
    assert model.lm_head.weight is model.token_embedding.weight
    for name, weight in model.named_parameters():
        narrow = name.endswith(("output.weight", "down.weight"))
        std = 0.02 / 4 if narrow else 0.02  # 4 = sqrt(2 * 8 layers)
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert weight.std().item() == pytest.approx(std, rel=0.02), name


SIZES = ("vocab_size", "context_length", "n_layers", "n_heads", "n_kv_heads", "d_model", "d_ff")
REFUSED = (
    [(name, value) for name in SIZES for value in (0, -1, True, 2.0, "2", None)]
    + [(name, value) for name in ("attention_window", "kv_compress_block")
       for value in (-1, False, 1.0, "1", None)]
    + [(name, value) for name in ("rope_base", "rope_scale", "norm_eps")
       for value in (0, -1, math.nan, math.inf, -math.inf, True, "1", None)]
    + [("dropout", value) for value in (-0.1, 1, 1.5, math.nan, math.inf, False, "0", None)]
    + [("position", value) for value in ("alibi", "", "RoPE", None, 0)]
    + [("attention", value) for value in ("flash", "", "SDPA", None, True)]
)  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_config_refuses_a_value(name: str, value: object):
    """The message names the field, what was given and what was expected."""
    with pytest.raises(ValueError, match=f"^{name} must be .+, got ") as error:
        DecoderConfig(**{"vocab_size": 61, name: value})
    assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("n_heads", {"n_kv_heads": 3}),
        ("n_heads", {"n_heads": 2, "n_kv_heads": 4}),
        ("d_model", {"d_model": 60}),
        ("d_model", {"d_model": 24}),  # a head size of 3 has no channel pairs
        ("attention_window", {"attention_window": 13}),
        ("kv_compress_block", {"kv_compress_block": 2}),
    ],
)
def test_config_refuses_what_does_not_fit_together(name: str, changes: dict):
    with pytest.raises(ValueError, match=f"^{name} must be .+, got ") as error:
        replace(SMALL, **changes)
    assert str(error.value).endswith(f"got {getattr(SMALL, name) if name not in changes else changes[name]}")


@pytest.mark.parametrize(
    "changes",
    [
        {"d_model": 24, "position": "learned"},
        {"d_model": 16},
        {"attention_window": 12, "kv_compress_block": 100},
        {"rope_base": 1, "rope_scale": 2, "dropout": 0},
        {"n_kv_heads": 8, "n_layers": 1, "d_ff": 1, "context_length": 1},
    ],
)
def test_config_accepts_the_edges(changes: dict):
    config = replace(SMALL, **changes)
    assert all(getattr(config, name) == value for name, value in changes.items())
    with pytest.raises(FrozenInstanceError):
        config.d_model = 128


# RoPE


@pytest.mark.parametrize(
    ("length", "head_size", "scale", "base", "start"),
    [(7, 8, 1.0, 10000.0, 0), (5, 6, 4.0, 10000.0, 3), (4, 2, 0.5, 3.0, 9), (3, 64, 1.7, 5e5, 509)],
)
def test_rope_tables(length: int, head_size: int, scale: float, base: float, start: int):
    cosine, sine = octlm.rope_tables(length, head_size, scale, "cpu", base=base, start=start)
    assert cosine.shape == sine.shape == (length, head_size // 2)
    for row in range(length):
        for pair in range(head_size // 2):
            angle = (start + row) / scale * base ** (-2 * pair / head_size)
            rounding = 1e-7 + 3e-7 * angle  # float32 carries angles to a relative 6e-8
            assert abs(cosine[row, pair].item() - math.cos(angle)) < rounding
            assert abs(sine[row, pair].item() - math.sin(angle)) < rounding


def test_rope_tables_default_base():
    pairs = zip(octlm.rope_tables(9, 8, 1.0, "cpu"), octlm.rope_tables(9, 8, 1.0, "cpu", 10000.0))
    assert all(torch.equal(default, named) for default, named in pairs)


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_rope_tables_are_float32(default: torch.dtype):
    """Half-precision tables would send distant positions to the same angle."""
    expected = octlm.rope_tables(300, 8, 1.5, "cpu")
    torch.set_default_dtype(default)
    try:
        found = octlm.rope_tables(300, 8, 1.5, "cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    for actual, table in zip(found, expected):
        assert actual.dtype == torch.float32 and torch.equal(actual, table)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
)
def test_apply_rope_turns_adjacent_pairs(dtype: torch.dtype, tolerance: float):
    """Pairs (2i, 2i + 1), not the halves of the head; the dtype stays the input's."""
    x = torch.randn(2, 3, 5, 6, generator=seeded(0)).to(dtype)
    turned = octlm.apply_rope(x, *octlm.rope_tables(5, 6, 2.0, "cpu", base=50.0, start=4))
    assert turned.dtype == dtype
    config = replace(SMALL, rope_base=50.0, rope_scale=2.0)
    expected = torch.zeros(2, 3, 5, 6, dtype=torch.float64)
    for b, h, t in np.ndindex(2, 3, 5):
        expected[b, h, t] = torch.from_numpy(
            reference_rotate(x[b, h, t].double().numpy(), 4 + t, config)
        )
    assert_near(turned, expected, tolerance)


# Full pass


def assert_equals_reference(model: Decoder, length: int = 12) -> None:
    ids = random_ids(2, length)
    expected = np.stack([reference_logits(model, row) for row in ids.tolist()])
    assert_near(model(ids).detach(), expected, 2e-5)
    tables = "float32 RoPE tables" if model.config.position == "rope" else ""
    assert_near(model.double()(ids).detach(), expected, 2e-6 if tables else 1e-12)


@pytest.mark.parametrize("attention", ["sdpa", "manual"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_full_pass_equals_the_loops(form: dict, attention: str):
    assert_equals_reference(small_model(**form, attention=attention))


@pytest.mark.parametrize("attention", ["sdpa", "manual"])
@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_and_compression_equal_the_loops(window: dict, position: str, attention: str):
    assert_equals_reference(small_model(**window, position=position, attention=attention))


@pytest.mark.parametrize("attention", ["sdpa", "manual"])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_texts_shorter_than_the_context_equal_the_loops(length: int, attention: str):
    model = small_model(attention=attention, attention_window=3, kv_compress_block=2)
    assert_equals_reference(model, length)
    assert_equals_reference(small_model(attention=attention), length)


@pytest.mark.parametrize("attention", ["sdpa", "manual"])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_full_pass_is_causal(window: int, attention: str):
    """A token changes no earlier row, bit for bit, and every later one within reach."""
    model = small_model(attention=attention, attention_window=window)
    ids = random_ids(1, 12)
    before = model(ids)[0]
    reach = model.config.n_layers * (window - 1) if window else 12
    for j in range(12):
        changed = ids.clone()
        changed[0, j] = (changed[0, j] + 1) % 61
        moved = (model(changed)[0] - before).abs().amax(dim=1)
        for i in range(12):
            assert moved[i] > 1e-4 if j <= i <= j + reach else moved[i] == 0, (i, j)


@pytest.mark.parametrize(
    "ids",
    [torch.zeros(5), torch.zeros(1, 2, 3), torch.zeros(1, 0), torch.zeros(0, 4), torch.tensor(3)],
    ids=lambda ids: str(list(ids.shape)),
)
def test_both_passes_refuse_a_wrong_shape(ids: Tensor):
    model = small_model()
    for call in (model, model.forward_cached):
        with pytest.raises(ValueError, match=r"^token IDs must have shape \[batch, nonempty sequ"):
            call(ids.long())


def test_both_passes_refuse_ids_that_are_no_integers():
    model = small_model()
    for call in (model, model.forward_cached):
        with pytest.raises(ValueError, match="^token IDs must be int64 or int32, got torch.float32"):
            call(torch.zeros(1, 3))


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_full_pass_refuses_more_than_the_context(position: str):
    model = small_model(position=position)
    assert model(random_ids(1, 12)).shape == (1, 12, 61)
    with pytest.raises(ValueError, match="13 positions exceed context_length 12"):
        model(random_ids(1, 13))


# Cached path


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_chunking_equals_the_full_pass(form: dict):
    """Wrong positions, masks or heads in any cached step; in float64, where rounding is no excuse."""
    model, ids = small_model(**form).double(), random_ids(2, 7)
    expected = model(ids).detach()
    cuts = list(compositions(7))
    assert len(cuts) == 64
    for lengths in cuts:
        assert_near(in_chunks(model, ids, lengths), expected, 1e-12)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("lengths", [(12,), (3,) * 4, (1,) * 12, (5, 1, 6), (1, 11)], ids=str)
def test_chunks_in_float32_equal_full_pass_and_loops(form: dict, lengths: tuple[int, ...]):
    """The whole prompt, three tokens and one token a step, up to the last position."""
    model, ids = small_model(**form), random_ids(2, 12)
    logits = in_chunks(model, ids, lengths)
    assert_near(logits, model(ids).detach(), 2e-5)
    assert_near(logits[1], reference_logits(model, ids[1].tolist()), 2e-5)


def test_saved_keys_are_rotated_once_at_their_position():
    """The saved keys are the projected ones, rotated; the saved values are as projected."""
    model, ids = small_model(n_layers=1), random_ids(1, 6)
    cache = None
    for chunk in ids.split((3, 1, 2), dim=1):
        _, cache = model.forward_cached(chunk, cache)
    key, value = cache[0]
    assert key.shape == value.shape == (1, 2, 6, 8)
    attention, norm = model.blocks[0].attention, model.blocks[0].attention_norm
    for i, token in enumerate(ids[0].tolist()):
        row = model.token_embedding.weight[token].detach().double().numpy()
        row = reference_norm(row, norm.weight.detach().double().numpy(), 1e-6)
        keys = (attention.key.weight.detach().double().numpy() @ row).reshape(2, 8)
        keys = np.stack([reference_rotate(head, i, model.config) for head in keys])
        values = (attention.value.weight.detach().double().numpy() @ row).reshape(2, 8)
        assert_near(key[0, :, i], keys, 1e-5)
        assert_near(value[0, :, i], values, 1e-5)


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
        assert (moved[:j] == 0).all() and (moved[j:] > 1e-3).all(), j


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_the_cache_is_a_value(position: str):
    """One prefix continued in two ways: nothing passed in changes, nothing returned is shared."""
    model, prefix = small_model(position=position), random_ids(2, 4)
    _, cache = model.forward_cached(prefix)
    entries, copies = list(cache), [tensor.clone() for tensor in tensors_of(cache)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(cache)}
    for seed, lengths in ((2, (5,)), (3, (1, 1, 3)), (4, (2, 3))):
        more, longer, rows = random_ids(2, 5, seed=seed), cache, []
        for chunk in more.split(lengths, dim=1):
            logits, longer = model.forward_cached(chunk, longer)
            rows.append(logits)
            returned = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(longer)}
            assert returned.isdisjoint(storages) and len(returned) == 2 * model.config.n_layers
        expected = model(torch.cat((prefix, more), dim=1))[:, 4:].detach()
        assert_near(torch.cat(rows, dim=1), expected, 2e-5)
        for tensor in tensors_of(longer):  # not even writing to the new one reaches the old one
            tensor.fill_(7.0)
    assert len(cache) == len(entries) and all(a is b for a, b in zip(cache, entries))
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(cache), copies))


def test_the_module_holds_no_state():
    """Two sequences in turns through one model: neither sees the other."""
    model, first, second = small_model(), random_ids(1, 9, seed=2), random_ids(3, 9, seed=3)
    before, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
    caches, rows = [None, None], [[], []]
    for start in (0, 3, 6):
        for i, ids in enumerate((first, second)):
            logits, caches[i] = model.forward_cached(ids[:, start : start + 3], caches[i])
            rows[i].append(logits)
    assert_near(torch.cat(rows[0], dim=1), model(first).detach(), 2e-5)
    assert_near(torch.cat(rows[1], dim=1), model(second).detach(), 2e-5)
    assert set(vars(model)) == attributes
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_cached_forward_requires_eval_mode():
    with pytest.raises(ValueError, match="^cached forward requires eval mode"):
        small_model().train().forward_cached(random_ids(1, 3))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "manual"},
        {"attention_window": 12},
        {"attention_window": 3, "kv_compress_block": 2},
    ],
    ids=str,
)
def test_cached_forward_requires_full_sdpa(changes: dict):
    with pytest.raises(ValueError, match="^cached forward requires full SDPA attention"):
        small_model(**changes).forward_cached(random_ids(1, 3))


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("lengths", [(13,), (12, 1), (11, 2), (4, 9)], ids=str)
def test_cached_forward_refuses_more_than_the_context(lengths: tuple[int, ...], position: str):
    """A slice past the end of a table or buffer would be silent."""
    model = small_model(position=position)
    with pytest.raises(ValueError, match="^cached sequence exceeds context_length"):
        in_chunks(model, random_ids(2, 13), lengths)


@pytest.mark.parametrize("change", [lambda c: [], lambda c: c[:1], lambda c: c + c[:1],
                                    lambda c: [c[0], c[1][:1]], lambda c: [c[0], c[1] * 2]])  # fmt: skip
def test_cache_must_have_one_entry_per_layer(change: Callable):
    model = small_model()
    cache = change(model.forward_cached(random_ids(1, 3))[1])
    with pytest.raises(ValueError, match="^cache must have one entry per layer"):
        model.forward_cached(random_ids(1, 1), cache)


def both(change: Callable[[Tensor], Tensor]) -> Callable:
    """Change key and value of the second layer alike."""
    return lambda cache: [cache[0], tuple(map(change, cache[1]))]


MISFITS = {  # what is done to a cache of shape (2, 2, 4, 8); what was given; what was expected
    "batch": (lambda c: [tuple(t[:1] for t in e) for e in c], "(1, 2, 4, 8)", "(2, 2, 4, 8)"),
    "batch of one layer": (both(lambda t: t[:1]), "(1, 2, 4, 8)", "(2, 2, 4, 8)"),
    "one head": (both(lambda t: t[:, :1]), "(2, 1, 4, 8)", "(2, 2, 4, 8)"),
    "heads": (both(lambda t: t.repeat(1, 2, 1, 1)), "(2, 4, 4, 8)", "(2, 2, 4, 8)"),
    "head size": (both(lambda t: t[..., :4]), "(2, 2, 4, 4)", "(2, 2, 4, 8)"),
    "dimensions": (both(lambda t: t[0]), "(2, 4, 8)", "(2, 2, 4, 8)"),
    "length of a layer": (both(lambda t: t[:, :, 1:]), "(2, 2, 3, 8)", "(2, 2, 4, 8)"),
    "short key": (lambda c: [(k[:, :, 1:], v) for k, v in c], "(2, 2, 4, 8)", "(2, 2, 3, 8)"),
    "short value": (lambda c: [(k, v[:, :, 1:]) for k, v in c], "(2, 2, 3, 8)", "(2, 2, 4, 8)"),
    "device": (both(lambda t: t.to("meta")), "meta", "cpu"),
    "half": (both(lambda t: t.half()), "torch.float16", "torch.float32"),
    "double": (lambda c: [tuple(t.double() for t in e) for e in c], "torch.float64", "torch.float32"),
    "double value": (lambda c: [(k, v.double()) for k, v in c], "torch.float64", "torch.float32"),
}  # fmt: skip


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize(("change", "given", "expected"), MISFITS.values(), ids=MISFITS)
def test_cache_that_does_not_fit(change: Callable, given: str, expected: str, new: int):
    """It is never broadcast, promoted or truncated, and the message names both sides."""
    model = small_model()
    cache = change(model.forward_cached(random_ids(2, 4))[1])
    with pytest.raises(ValueError, match=r"^cache .*must be .*, got ") as error:
        model.forward_cached(random_ids(2, new), cache)
    wanted, _, found = str(error.value).partition("got ")
    assert given in found and expected in wanted


def test_cache_must_have_the_dtype_of_the_new_keys():
    """Under autocast the new keys are not of the weights' dtype."""
    model, ids = small_model(), random_ids(1, 5)
    _, full_precision = model.forward_cached(ids[:, :4])
    with torch.autocast("cpu", torch.bfloat16):
        _, cache = model.forward_cached(ids[:, :4])
        _, longer = model.forward_cached(ids[:, 4:], cache)
        assert {tensor.dtype for tensor in tensors_of(longer)} == {torch.bfloat16}
        with pytest.raises(ValueError, match="must be torch.bfloat16, got torch.float32"):
            model.forward_cached(ids[:, 4:], full_precision)
    with pytest.raises(ValueError, match="must be torch.float32, got torch.bfloat16"):
        model.forward_cached(ids[:, 4:], cache)


# Weights: nothing derived from them is kept


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("change", ["in place", "load_state_dict", "half", "double"])
def test_changed_weights_take_effect_at_the_next_call(change: str, position: str):
    model, ids = small_model(position=position), random_ids(2, 6)

    def everything(model: Decoder) -> list[Tensor]:
        return [model(ids), in_chunks(model, ids, (3, 1, 2)), model.generate(ids, 3),
                model.generate_cached(ids, 3)]  # fmt: skip

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


@pytest.mark.parametrize("changes", [{}, {"position": "learned", "attention": "manual"}], ids=str)
def test_training_after_inference_equals_training_without(changes: dict):
    """An inference tensor kept from an evaluation would break or change the backward pass."""
    gradients = []
    for evaluated in (False, True):
        model, ids = small_model(dropout=0.2, **changes), random_ids(2, 8)
        if evaluated:
            model.generate(ids, 3)
            if model.config.attention == "sdpa":
                model.generate_cached(ids, 6)
                model.forward_cached(ids[:, 5:], model.forward_cached(ids[:, :5])[1])
        model.train()
        torch.manual_seed(5)
        F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.isfinite().all() and gradient.abs().max() > 0, name
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.parametrize("attention", ["sdpa", "manual"])
def test_dropout_in_training_only(attention: str):
    model, ids = small_model(dropout=0.5, attention=attention), random_ids(1, 8)
    plain = small_model(attention=attention)
    assert torch.equal(model(ids), plain(ids)) and torch.equal(model(ids), model(ids))
    rope, x = octlm.rope_tables(8, 8, 1.0, "cpu"), torch.randn(1, 8, 64, generator=seeded(0))
    layer = model.blocks[0].attention
    assert torch.equal(layer(x, rope), layer(x, rope))
    model.train()
    assert not torch.equal(model(ids), model(ids))
    assert not torch.equal(layer(x, rope), layer(x, rope))  # on the attention weights, too
    plain.train()
    assert torch.equal(plain(ids), plain.eval()(ids))


# The two generators

SAMPLED = {"temperature": 0.9, "top_k": 20}


def by_hand(model: Decoder, ids: Tensor, count: int, seed: int | None, **sampling) -> Tensor:
    """Generation as a loop over the full pass and nothing else."""
    generator = seeded(seed) if seed is not None else None
    for _ in range(count):
        logits = model(ids[:, -model.config.context_length :])[:, -1].detach()
        if seed is None:
            best = [max(range(len(row)), key=row.__getitem__) for row in logits.tolist()]
            token = torch.tensor(best)[:, None]
        else:
            token = octlm.sample(logits, generator=generator, **sampling)
        ids = torch.cat((ids, token), dim=1)
    return ids


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("length", [3, 8, 11])
def test_generators_agree_across_the_context(form: dict, length: int):
    """12 new tokens, context 8; prompts shorter than the context, as long, and longer."""
    model, prompt = small_model(**form, context_length=8), random_ids(2, length)
    for seed, sampling in ((None, {}), (7, {"temperature": 0.9}), (7, SAMPLED)):
        expected = by_hand(model, prompt, 12, seed, **sampling)
        assert torch.equal(expected[:, :length], prompt) and expected.shape == (2, length + 12)
        assert expected[:, length:].unique().numel() >= 6  # a model stuck on a token shows nothing
        for generate in (model.generate, model.generate_cached):
            generator = seeded(seed) if seed is not None else None
            found = generate(prompt, 12, generator=generator, **sampling)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("window", [w for w in WINDOWS if w["attention_window"] <= 8], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "manual"])
def test_naive_generator_takes_every_attention_form(window: dict, attention: str):
    model = small_model(**window, context_length=8, attention=attention)
    prompt = random_ids(2, 5)
    assert torch.equal(model.generate(prompt, 6), by_hand(model, prompt, 6, None))
    with pytest.raises(ValueError, match="^cached forward requires full SDPA attention"):
        model.generate_cached(prompt, 6)


@pytest.mark.parametrize("name", ["generate", "generate_cached"])
def test_a_batch_equals_its_rows(name: str):
    model, prompts = small_model(context_length=8), random_ids(5, 4)
    together = getattr(model, name)(prompts, 9)
    for row in range(5):
        alone = getattr(model, name)(prompts[row : row + 1], 9)
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize("name", ["generate", "generate_cached"])
@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_result_is_an_ordinary_tensor(name: str, count: int, dtype: torch.dtype, mode: Callable):
    """int64 that autograd accepts, whatever the caller's mode; the prompt is left alone."""
    model = small_model()
    with mode():
        prompt = random_ids(2, 4).to(dtype)
        found = getattr(model, name)(prompt, count)
        assert torch.equal(prompt, random_ids(2, 4)) and torch.equal(found[:, :4], prompt)
    assert found.dtype == torch.int64 and found.shape == (2, 4 + count)
    assert not found.is_inference() and found.untyped_storage() is not prompt.untyped_storage()
    model(found).sum().backward()
    assert model.token_embedding.weight.grad.isfinite().all()
    found[0, 0] = 0  # writing to the result does not reach the prompt
    assert torch.equal(prompt, random_ids(2, 4))


@pytest.mark.parametrize(
    ("name", "length", "expected"),
    [
        ("generate_cached", 3, [3] + [1] * 5),
        ("generate_cached", 8, [8] * 6),
        ("generate_cached", 5, [5, 1, 1, 1, 8, 8]),
        ("generate", 3, [3, 4, 5, 6, 7, 8]),
        ("generate", 6, [6, 7, 8, 8, 8, 8]),
    ],
)
def test_what_a_generator_computes(name: str, length: int, expected: list[int]):
    """n new tokens cost one prompt pass and n - 1 steps; the baseline projects one position."""
    model, positions, projected = small_model(context_length=8), [], []
    for block in model.blocks:
        block.attention.key.register_forward_hook(lambda m, x, y: positions.append(x[0].shape[1]))
    model.lm_head.register_forward_hook(lambda m, x, y: projected.append(x[0].numel() // (2 * 64)))
    getattr(model, name)(random_ids(2, length), 6)
    assert positions == [count for count in expected for _ in model.blocks]
    if name == "generate":
        assert projected == [1] * 6


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=str)
def test_stream_equals_generate(cached: bool, sampling: dict):
    model, prompt = small_model(context_length=8), random_ids(3, 4)
    expected = model.generate(prompt, 9, **sampling, generator=seeded(3))
    tokens = list(model.stream(prompt, 9, cached, **sampling, generator=seeded(3)))
    assert all(token.shape == (3, 1) and token.dtype == torch.int64 for token in tokens)
    assert not any(token.is_inference() for token in tokens)
    assert torch.equal(torch.cat((prompt, *tokens), dim=1), expected)
    assert list(model.stream(prompt, 0, cached)) == []


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.no_grad, torch.inference_mode, contextlib.nullcontext]
)
def test_stream_leaves_the_callers_mode_alone(cached: bool, mode: Callable):
    def modes() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    model, outside = small_model(), modes()
    with mode():
        inside = modes()
        stream = model.stream(random_ids(1, 3), 6, cached)
        assert modes() == inside
        for _, _ in zip(range(2), stream):
            assert modes() == inside
    assert modes() == outside
    token = next(stream)  # made in one mode, continued in another
    assert modes() == outside
    model(token).sum().backward()
    stream.close()
    assert modes() == outside
    next(model.stream(random_ids(1, 3), 6, cached))  # abandoned and collected
    assert modes() == outside


BAD_CALLS = [
    ({"token_ids": torch.zeros(1, 0, dtype=torch.long)}, "token IDs must have shape"),
    ({"token_ids": torch.zeros(3, dtype=torch.long)}, "token IDs must have shape"),
    ({"token_ids": torch.zeros(1, 3)}, "token IDs must be int64"),
    ({"token_ids": torch.tensor([[3, -1, 5]])}, "token IDs must be from 0 to 60, got -1 to 5"),
    ({"token_ids": torch.tensor([[3, 61, 5]])}, "token IDs must be from 0 to 60, got 3 to 61"),
    ({"token_ids": torch.zeros(1, 3, dtype=torch.long, device="meta")}, "token IDs must be on cpu"),
    ({"max_new_tokens": -1}, "max_new_tokens must be .+ got -1"),
    ({"max_new_tokens": 2.0}, "max_new_tokens must be .+ got 2.0"),
    ({"max_new_tokens": True}, "max_new_tokens must be .+ got True"),
    ({"temperature": -0.5}, "temperature must be .+ got -0.5"),
    ({"temperature": math.nan}, "temperature must be .+ got nan"),
    ({"temperature": math.inf}, "temperature must be .+ got inf"),
    ({"temperature": -math.inf}, "temperature must be .+ got -inf"),
    ({"top_k": 0}, "top_k must be .+ got 0"),
    ({"top_k": -3}, "top_k must be .+ got -3"),
    ({"top_k": 1.5}, "top_k must be .+ got 1.5"),
    ({"generator": SimpleNamespace(device=torch.device("meta"))}, "generator must be on cpu, got meta"),
    ({"training": True}, "generation requires eval mode"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), BAD_CALLS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("name", ["generate", "generate_cached", "stream"])
@pytest.mark.parametrize("greedy", [True, False])
def test_arguments_are_checked_at_the_call(name: str, changes: dict, text: str, greedy: bool):
    """Before any work, in a stream before the first `next`, and also where they would not be used."""
    model, calls = small_model().train("training" in changes), []
    model.final_norm.register_forward_hook(lambda *_: calls.append(1))
    arguments = {"token_ids": random_ids(1, 3), "max_new_tokens": 4}
    arguments |= {"temperature": 0.0 if greedy else 0.7} | changes
    arguments.pop("training", None)
    with pytest.raises(ValueError, match=f"^{text}"):
        getattr(model, name)(**arguments)
    assert not calls


WEIGHTS = [
    "token_embedding.weight", "final_norm.weight", "blocks.1.attention_norm.weight",
    "blocks.0.attention.query.weight", "blocks.1.attention.value.weight",
    "blocks.0.attention.output.weight", "blocks.1.feed_forward.gate.weight",
    "blocks.0.feed_forward.down.weight",
]  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=str)
def test_weights_that_are_not_finite_raise(name: str, value: float, sampling: dict):
    """argmax of NaN is an index like any other: a broken model would say token 0 for ever."""
    model, prompt = small_model(), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value  # of the embedding: a token not in the prompt
    for cached in (True, False):
        with pytest.raises(RuntimeError, match="not finite"):
            next(model.stream(prompt, 4, cached, **sampling))
    for generate in (model.generate, model.generate_cached):
        with pytest.raises(RuntimeError, match="not finite"):
            generate(prompt, 4, **sampling)


@pytest.mark.parametrize("cached", [True, False])
def test_stream_stops_at_the_first_logits_that_are_not_finite(cached: bool):
    """Only position 5 is broken: three tokens after a prompt of three are good, no more."""
    model = small_model(position="learned")
    expected = model.generate(random_ids(1, 3), 3)[0, 3:].tolist()
    with torch.no_grad():
        model.position_embedding.weight[5, 0] = math.nan
    stream = model.stream(random_ids(1, 3), 6, cached)
    assert [next(stream).item() for _ in range(3)] == expected
    with pytest.raises(RuntimeError, match="not finite"):
        next(stream)


# Sampling


@pytest.mark.parametrize(
    ("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, None), (0.7, 5), (1.5, 1), (1.0, 11)]
)
def test_sample_draws_from_the_softmax(temperature: float, top_k: int | None):
    """20,000 draws against a float64 softmax; chi-square with at most 11 degrees of freedom."""
    logits = torch.randn(12, generator=seeded(0)) * 1.5
    drawn = octlm.sample(logits.expand(20_000, -1), temperature, top_k, seeded(1))
    assert drawn.shape == (20_000, 1) and drawn.dtype == torch.int64
    counts = torch.bincount(drawn[:, 0], minlength=12).tolist()
    kept = sorted(range(12), key=lambda i: -logits[i].item())[: top_k or 12]
    shares = {i: math.exp(logits[i].item() / temperature) for i in kept}
    expected = {i: 20_000 * share / sum(shares.values()) for i, share in shares.items()}
    assert sum(counts[i] for i in kept) == 20_000
    statistic = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in kept)
    assert statistic < 24.7  # 1 % of right samplers would fail, with another seed


def test_greedy_takes_the_lowest_index_among_equals():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0], [4.0, 4.0, 4.0, 4.0, 4.0]])
    assert octlm.sample(logits).tolist() == [[1], [0]]
    assert octlm.sample(logits.repeat(1, 500)).tolist() == [[1], [0]]


@pytest.mark.parametrize(
    ("row", "top_k", "kept"),
    [
        ([1.0, 3.0, 3.0, 2.0, 3.0, 3.0], 2, {1, 2}),
        ([1.0, 2.0, 3.0, 2.0, 2.0, 0.0], 3, {1, 2, 3}),
        ([0.0] * 300, 5, {0, 1, 2, 3, 4}),
        ([3.0, 3.0, 3.0], 1, {0}),
    ],
)
def test_top_k_keeps_exactly_k_lowest_index_first(row: list[float], top_k: int, kept: set[int]):
    logits = torch.tensor(row).expand(2000, -1)
    assert set(octlm.sample(logits, 5.0, top_k, seeded(0))[:, 0].tolist()) == kept


def test_top_k_over_the_vocabulary_keeps_all():
    logits = torch.randn(500, 30, generator=seeded(0))
    every = octlm.sample(logits, 1.3, None, seeded(4))
    assert every.unique().numel() > 20
    for top_k in (30, 31, 10**6):
        assert torch.equal(octlm.sample(logits, 1.3, top_k, seeded(4)), every)


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-46, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float, top_k: int | None):
    """Division by it overflows float32."""
    logits = torch.randn(200, 30, generator=seeded(0)) * 50
    logits[0, 0], logits[1, 7] = 3e38, -3e38
    found = octlm.sample(logits, temperature, top_k, seeded(1))
    assert torch.equal(found, logits.argmax(dim=-1, keepdim=True))


@pytest.mark.parametrize("temperature", [1e10, 1e38, 1e300])
def test_a_huge_temperature_is_uniform(temperature: float):
    logits = (torch.randn(8, generator=seeded(0)) * 50).expand(8000, -1)
    counts = torch.bincount(octlm.sample(logits, temperature, None, seeded(1))[:, 0], minlength=8)
    assert (counts - 1000).abs().max() < 120  # four standard deviations
    few = octlm.sample(logits, temperature, 3, seeded(1))
    assert set(few[:, 0].tolist()) == set(logits[0].topk(3).indices.tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sample_works_in_float32(dtype: torch.dtype):
    logits = (torch.randn(300, 40, generator=seeded(0)) * 3).to(dtype)
    expected = octlm.sample(logits.float(), 0.8, 9, seeded(2))
    assert torch.equal(octlm.sample(logits, 0.8, 9, seeded(2)), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_refuses_logits_that_are_not_finite(value: float, temperature: float):
    logits = torch.zeros(2, 5)
    logits[1, 3] = value
    with pytest.raises(RuntimeError, match="logits are not finite"):
        octlm.sample(logits, temperature)


def test_seeds_decide_and_the_global_state_rests():
    model, prompt = small_model(), random_ids(1, 3)
    for generate in (model.generate, model.generate_cached):
        torch.manual_seed(11)
        state = torch.get_rng_state()
        first, again, other = (
            generate(prompt, 9, **SAMPLED, generator=seeded(seed)) for seed in (1, 1, 2)
        )
        assert torch.equal(first, again) and not torch.equal(first, other)
        generate(prompt, 9)  # nor does greedy decoding move it
        assert torch.equal(torch.get_rng_state(), state)
        unseeded = generate(prompt, 9, **SAMPLED)
        assert not torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(11)
        assert torch.equal(generate(prompt, 9, **SAMPLED), unseeded)


# Bytes


@pytest.mark.parametrize(("length", "size"), [(0, 0), (1, 4), (64, 256), (256, 1024), (512, 2048)])
def test_kv_cache_bytes_of_the_default_model(length: int, size: int):
    assert octlm.kv_cache_bytes(DecoderConfig(vocab_size=8192), length, 2) == size * 1024


@pytest.mark.parametrize("form", FORMS[:8], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_held_are_the_formula(form: dict, batch: int, dtype: torch.dtype):
    """By shape and by storage: a view of a larger tensor would hold more than it shows."""
    model, cache, length = small_model(**form).to(dtype), None, 0
    for chunk in random_ids(batch, 12).split((4, 1, 1, 3, 1, 2), dim=1):
        _, cache = model.forward_cached(chunk, cache)
        length += chunk.shape[1]
        expected = 2 * 2 * form["n_kv_heads"] * 8 * length * dtype.itemsize * batch
        tensors = tensors_of(cache)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert octlm.kv_cache_bytes(model.config, length, dtype.itemsize) * batch == expected
        assert sum(t.numel() * t.element_size() for t in tensors) == expected
        assert sum(storages.values()) == expected and len(storages) == len(tensors)
