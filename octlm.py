"""octlm: a small decoder-only language model with cached generation, in one module.

RoPE or learned positions, grouped-query attention (GQA), SwiGLU, pre-norm RMSNorm, no biases, tied
output head. `forward` computes every position, `forward_cached` the new ones alone. Generation by
either chooses the same tokens, unless two logits are equal within rounding.

Notation: B batch, T new positions, S saved + new positions, H query heads, K key-value heads,
D head size. Query head h reads key-value head h // (H // K): if H = 8, K = 2, heads 0-3 read 0.
"""

import io
import json
import math
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rope = tuple[Tensor, Tensor]  # cosine and sine, each [T, D / 2]
KeyValue = tuple[Tensor, Tensor]  # of one layer, each [B, K, S, D]
Cache = list[KeyValue]  # one pair per layer


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and arithmetic of a `Decoder`, by default the 26M model; ValueError for a bad field."""

    vocab_size: int
    context_length: int = 512  # the most positions that one pass can hold
    n_layers: int = 8
    n_heads: int = 8  # query heads
    n_kv_heads: int = 2  # key-value heads, each read by n_heads / n_kv_heads query heads
    d_model: int = 512  # width of the residual stream
    d_ff: int = 1368  # hidden width of the feed-forward layers
    position: str = "rope"  # "rope" rotates queries and keys; "learned" adds a vector per position
    rope_base: float = 10000.0
    rope_scale: float = 1.0  # positions are divided by it before RoPE
    attention: str = "sdpa"  # PyTorch's fused attention; "manual" is the same written out
    attention_window: int = 0  # w: query i sees keys j with i - w < j <= i; 0: all up to i
    kv_compress_block: int = 0  # b: older keys are seen as means of whole blocks of b; 0: not seen
    dropout: float = 0.0
    norm_eps: float = 1e-6  # added to the mean square in RMSNorm

    def __post_init__(self) -> None:
        def require(name: str, holds: bool, expected: str) -> None:
            if not holds:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")

        types = {int: (int,), float: (float, int), str: (str,)}
        for field in fields(self):
            fits = type(getattr(self, field.name)) in types[field.type]  # exactly: True is no int
            require(field.name, fits, f"of type {field.type.__name__}")
        for name in "vocab_size context_length n_layers n_heads n_kv_heads d_model d_ff".split():
            require(name, getattr(self, name) > 0, "a positive integer")
        for name in ("attention_window", "kv_compress_block"):
            require(name, getattr(self, name) >= 0, "0 (off) or a positive integer")
        largest = torch.finfo(torch.float32).max
        for name in ("rope_base", "rope_scale", "norm_eps"):
            require(name, 0 < getattr(self, name) <= largest, "a positive, finite number")
        require("dropout", 0 <= self.dropout < 1, "at least 0 and below 1")
        require("position", self.position in ("rope", "learned"), "'rope' or 'learned'")
        require("attention", self.attention in ("sdpa", "manual"), "'sdpa' or 'manual'")
        heads, kv_heads = self.n_heads, self.n_kv_heads
        require("d_model", self.d_model % heads == 0, f"a multiple of n_heads={heads}")
        require("n_heads", heads % kv_heads == 0, f"a multiple of n_kv_heads={kv_heads}")
        fits = self.position == "learned" or self.head_size % 2 == 0
        require("head_size", fits, "even for RoPE (it is d_model / n_heads)")
        # No RoPE angle may be infinite in float32, since infinity has no sine.
        fits = self.context_length < largest * self.rope_scale * min(self.rope_base, 1)
        require("rope_scale", fits, f"larger for context_length and rope_base={self.rope_base}")
        fits = self.attention_window <= self.context_length
        require("attention_window", fits, f"at most context_length={self.context_length}")
        fits = self.attention_window > 0 or self.kv_compress_block == 0
        require("kv_compress_block", fits, "0 without an attention_window")

    @property
    def head_size(self) -> int:
        return self.d_model // self.n_heads


def rope_tables(length: int, head_size: int, scale: float, device: torch.device | str,
                base: float = 10000.0, start: int = 0) -> Rope:
    """Cosine and sine for the positions from `start` on, each float32 [length, head_size // 2].

    Channel pair i of position p rotates by (p / scale) * base ** (-2i / head_size) radians
    (RoFormer, arXiv 2104.09864); a scale above 1 interpolates positions (arXiv 2306.15595).
    """
    channels = torch.arange(0, head_size, 2, dtype=torch.float32, device=device)
    positions = torch.arange(start, start + length, dtype=torch.float32, device=device) / scale
    angles = positions[:, None] / base ** (channels / head_size)  # [T, D / 2]
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the adjacent channel pairs (2i, 2i + 1) of x [..., T, D]; keeps the dtype of x."""
    # A pair, as a complex number, is rotated when multiplied by cosine + i * sine. view_as_complex
    # needs what the copy is: contiguous, at an even offset in its storage, not in half precision.
    dtype = torch.promote_types(x.dtype, cosine.dtype)
    pairs = x.to(dtype, copy=True, memory_format=torch.contiguous_format).unflatten(-1, (-1, 2))
    rotated = torch.view_as_complex(pairs) * torch.complex(cosine, sine)  # [..., T, D / 2]
    return torch.view_as_real(rotated).flatten(-2).to(x.dtype)


def attention_mask(config: DecoderConfig, length: int, device: torch.device) -> Tensor:
    """What each query of a full pass sees: bool [length, length + pooled blocks]."""
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)
    window = config.attention_window or length
    mask = (column <= row) & (column > row - window)
    if block := config.kv_compress_block:
        last = column[block - 1 :: block]  # the last position of each whole block
        mask = torch.cat((mask, last <= row - window), dim=1)  # seen once it has left the window
    return mask


def append_pooled(x: Tensor, block: int) -> Tensor:
    """[B, K, T, D] to [B, K, T + blocks, D]: behind the positions, the mean of each whole block."""
    whole = x.shape[2] // block * block
    pooled = x[:, :, :whole].unflatten(2, (-1, block)).mean(dim=3)  # [B, K, blocks, D]
    return torch.cat((x, pooled), dim=2)


def repeat_kv(x: Tensor, n_heads: int) -> Tensor:
    """[B, K, S, D] to [B, H, S, D]: each key-value head once for every query head that reads it."""
    # SDPA's enable_gqa=True would save the copies, but it rules out fast kernels on older GPUs.
    return x.unsqueeze(2).expand(-1, -1, n_heads // x.shape[1], -1, -1).flatten(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, D] to [B, T, H * D]."""
    return x.transpose(1, 2).flatten(2)


def manual_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor,
                     dropout: float) -> Tensor:
    """Attention written out, for query [B, H, T, D], key and value [B, H, S, D], mask [T, S]."""
    scores = query / math.sqrt(query.shape[-1]) @ key.transpose(-2, -1)  # [B, H, T, S]
    weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
    return F.dropout(weights, dropout) @ value  # [B, H, T, D]


def cached_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The newest T of S positions attend to all: query [B, H, T, D], key and value [B, K, S, D]."""
    new, total = query.shape[2], key.shape[2]
    if new == 1:
        # It sees every key: no mask. The query heads that read one key-value head become the rows
        # of one product, so that the keys and values are neither copied nor read twice.
        rows = query.reshape(*key.shape[:2], -1, key.shape[3])  # [B, K, H / K, D]
        return F.scaled_dot_product_attention(rows, key, value).reshape(query.shape)
    key, value = repeat_kv(key, query.shape[1]), repeat_kv(value, query.shape[1])
    if new == total:  # nothing was saved before: the first chunk
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    column = torch.arange(total, device=query.device)
    mask = column <= column[-new:, None]  # is_causal=True would take the first row for position 0
    return F.scaled_dot_product_attention(query, key, value, mask)


class Linear(nn.Linear):
    """A layer without bias. On a CPU, all cores share the product of a single float32 row."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if (torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or not x.is_cpu
                or x.shape != (1, 1, self.in_features) or x.dtype != torch.float32
                or (threads := torch.get_num_threads()) == 1 or self.out_features % threads
                or type(weight := self.weight) not in (nn.Parameter, Tensor)  # quantized: no views
                or weight.layout != torch.strided or not weight.is_contiguous()):
            return super().forward(x)
        # PyTorch's own product of one row often uses one core: here each takes a slice of outputs.
        slices = weight.view(threads, -1, self.in_features)
        return torch.bmm(x.expand(threads, -1, -1), slices.mT).view(1, 1, -1)


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245), over all positions or over cached ones."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.query = Linear(config.d_model, config.d_model)
        self.key = Linear(config.d_model, config.n_kv_heads * config.head_size)
        self.value = Linear(config.d_model, config.n_kv_heads * config.head_size)
        self.output = Linear(config.d_model, config.d_model)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, d_model] to query [B, H, T, D], key and value [B, K, T, D], not yet rotated."""
        layers, split = (self.query, self.key, self.value), (-1, self.config.head_size)
        return tuple(layer(x).unflatten(-1, split).transpose(1, 2) for layer in layers)

    def forward(self, x: Tensor, rope: Rope | None) -> Tensor:
        """The full pass: every position of x [B, T, d_model] attends to all that it may see."""
        config = self.config
        query, key, value = self.project(x)
        key_rope = rope
        if block := config.kv_compress_block:  # pooled before rotation
            key, value = append_pooled(key, block), append_pooled(value, block)
            if rope is not None:  # a pooled key is rotated at the middle of its block
                whole = x.shape[1] // block * block
                key_rope = tuple(torch.cat((t, t[block // 2 : whole : block])) for t in rope)
        if rope is not None:
            query, key = apply_rope(query, *rope), apply_rope(key, *key_rope)
        key, value = repeat_kv(key, config.n_heads), repeat_kv(value, config.n_heads)
        dropout = config.dropout if self.training else 0.0
        if config.attention == "manual":
            mask = attention_mask(config, x.shape[1], x.device)
            heads = manual_attention(query, key, value, mask, dropout)
        else:
            mask = attention_mask(config, x.shape[1], x.device) if config.attention_window else None
            heads = F.scaled_dot_product_attention(
                query, key, value, mask, dropout, is_causal=mask is None)
        return self.output(merge_heads(heads))

    def forward_cached(self, x: Tensor, rope: Rope | None,
                       cache: KeyValue | None) -> tuple[Tensor, KeyValue]:
        """The cached pass: the new positions x [B, T, d_model] attend to the saved and new keys.

        Returns the output [B, T, d_model] and the joined key and value, each [B, K, S, D];
        ValueError if the cache's dtype is not that of the new keys.
        """
        query, key, value = self.project(x)
        if rope is not None:  # a key is rotated here, once, at its absolute position
            query, key = apply_rope(query, *rope), apply_rope(key, *rope)
        if cache is not None:
            if not cache[0].dtype == cache[1].dtype == key.dtype:
                given = f"{cache[0].dtype} and {cache[1].dtype}"
                raise ValueError(f"cache dtype must be {key.dtype}, got {given}")
            key, value = torch.cat((cache[0], key), dim=2), torch.cat((cache[1], value), dim=2)
        return self.output(merge_heads(cached_attention(query, key, value))), (key, value)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = Linear(config.d_model, config.d_ff)
        self.up = Linear(config.d_model, config.d_ff)
        self.down = Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rope: Rope | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rope))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

    def forward_cached(self, x: Tensor, rope: Rope | None,
                       cache: KeyValue | None) -> tuple[Tensor, KeyValue]:
        """As `forward` in eval mode, for new positions; also returns the joined key and value."""
        attended, cache = self.attention.forward_cached(self.attention_norm(x), rope, cache)
        x = x + attended
        return x + self.feed_forward(self.feed_forward_norm(x)), cache


class Decoder(nn.Module):
    """The language model. It holds weights and nothing else: no state survives a call."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        # Not nn.Embedding(): on the meta device, where load_checkpoint builds its model, its normal
        # draw imports PyTorch's compiler (a second). The loop below draws all matrices anyway.
        self.token_embedding = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.d_model), freeze=False)
        if config.position == "learned":
            self.position_embedding = nn.Embedding.from_pretrained(
                torch.empty(config.context_length, config.d_model), freeze=False)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.final_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = Linear(config.d_model, config.vocab_size)
        self.lm_head.weight = self.token_embedding.weight
        for name, weight in self.named_parameters():  # as GPT-2; the norms' vectors stay at 1
            if weight.ndim == 2 and not weight.is_meta:
                residual = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * config.n_layers if residual else 1) ** 0.5)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Full pass: token_ids [B, T] to logits [B, T, vocab], T at most context_length.

        Raises ValueError for another shape or dtype, or for more positions. An id outside the
        vocabulary is PyTorch's IndexError: to check for it here would stall a GPU at every step.
        """
        return self.lm_head(self._hidden(token_ids))

    def _hidden(self, token_ids: Tensor) -> Tensor:
        """The full pass up to the output head: [B, T, d_model]."""
        x, rope = self._embed(token_ids, "sequence")
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rope)
        return self.final_norm(x)

    @torch.inference_mode()
    def forward_cached(self, token_ids: Tensor,
                       cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Cached pass: only the new token_ids [B, T], after the positions that `cache` holds.

        Returns logits [B, T, vocab] and a new cache: one (key, value) per layer, each
        [B, K, S, D]. The cache passed in is unchanged, so a prefix can be continued in two ways.
        Errors as in `forward`; ValueError, too, in training mode, for windowed, compressed or
        manual attention, and for a cache that does not fit.
        """
        self._check_mode("cached forward", cached=True)
        hidden, cache = self._hidden_cached(token_ids, cache)
        return self.lm_head(hidden), cache

    def _hidden_cached(self, token_ids: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """The cached pass up to the output head: [B, T, d_model] and the new cache."""
        x, rope = self._embed(token_ids, "cached sequence", cache)
        joined = []
        for layer, block in enumerate(self.blocks):
            x, entry = block.forward_cached(x, rope, None if cache is None else cache[layer])
            joined.append(entry)
        return self.final_norm(x), joined

    def _embed(self, token_ids: Tensor, what: str,
               cache: Cache | None = None) -> tuple[Tensor, Rope | None]:
        """Embeddings [B, T, d_model] and RoPE tables after the cache; `what` begins an error."""
        _check_token_ids(token_ids)
        config, (batch, length) = self.config, token_ids.shape
        start = 0 if cache is None else self._saved_positions(cache, batch)
        if start + length > config.context_length:
            raise ValueError(f"{what} exceeds context_length {config.context_length}: "
                             f"{start + length} positions")
        x = self.token_embedding(token_ids)
        if config.position == "learned":
            return x + self.position_embedding.weight[start : start + length], None
        return x, rope_tables(length, config.head_size, float(config.rope_scale), x.device,
                              float(config.rope_base), start)

    def _check_mode(self, what: str, cached: bool) -> None:
        if self.training:
            raise ValueError(f"{what} requires eval mode")
        if cached and (self.config.attention != "sdpa" or self.config.attention_window):
            raise ValueError(f"cached forward requires full SDPA attention, got {self.config}")

    def _saved_positions(self, cache: Cache, batch: int) -> int:
        """How many positions the cache holds; ValueError unless every layer fits."""
        config, device = self.config, self.token_embedding.weight.device
        if not isinstance(cache, (list, tuple)) or len(cache) != config.n_layers or not all(
                isinstance(pair, (list, tuple)) and len(pair) == 2
                and all(isinstance(tensor, Tensor) for tensor in pair) for pair in cache):
            raise ValueError(f"cache must have one entry per layer: {config.n_layers} tensor pairs")
        saved = cache[0][0].shape[-2] if cache[0][0].ndim > 1 else 0
        expected = (batch, config.n_kv_heads, saved, config.head_size)
        for layer, pair in enumerate(cache):
            for tensor in pair:
                if tensor.shape != expected or tensor.device != device:
                    raise ValueError(f"cache of layer {layer} must be {expected} on {device}, "
                                     f"got {tuple(tensor.shape)} on {tensor.device}")
        return saved

    def generate(self, token_ids: Tensor, max_new_tokens: int, **sampling: Any) -> Tensor:
        """Naive generation, the baseline: a full pass over the newest tokens at every step.

        Returns int64 [B, prompt + max_new_tokens]. `sampling` and errors as in `stream`.
        """
        return _joined(token_ids, self.stream(token_ids, max_new_tokens, False, **sampling))

    def generate_cached(self, token_ids: Tensor, max_new_tokens: int, **sampling: Any) -> Tensor:
        """Cached generation: one pass over the prompt, then one token per step.

        Returns the tokens that `generate` returns, unless a deciding margin is within rounding.
        Past context_length each step shifts every position, so the cache is rebuilt: no gain.
        """
        return _joined(token_ids, self.stream(token_ids, max_new_tokens, True, **sampling))

    def stream(self, token_ids: Tensor, max_new_tokens: int, cached: bool = True, *,
               temperature: float = 0.0, top_k: int | None = None,
               generator: torch.Generator | None = None) -> Iterator[Tensor]:
        """Yield max_new_tokens times the next int64 [B, 1] after the prompt token_ids [B, T].

        The model sees the newest context_length tokens. Temperature 0 is greedy; above it, a draw
        from the `top_k` most likely tokens (None: all), with `generator` on the model's device.
        Raises ValueError at the call for arguments that do not fit and outside eval mode, and
        RuntimeError before it would yield a token chosen from logits that are not finite.
        """
        config, device = self.config, self.token_embedding.weight.device
        self._check_mode("generation", cached)
        _check_token_ids(token_ids)
        if token_ids.device != device:
            raise ValueError(f"token IDs must be on {device}, got {token_ids.device}")
        if token_ids.min() < 0 or token_ids.max() >= config.vocab_size:
            raise ValueError(f"token IDs must be from 0 to {config.vocab_size - 1}, "
                             f"got {token_ids.min()} to {token_ids.max()}")
        if type(max_new_tokens) is not int or max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be an integer >= 0, got {max_new_tokens!r}")
        _check_sampling(temperature, top_k, generator, device)
        newest = token_ids[:, -config.context_length :].to(torch.int64, copy=True)
        return self._stream(newest, max_new_tokens, cached, temperature, top_k, generator)

    def _stream(self, token_ids: Tensor, max_new_tokens: int, cached: bool, temperature: float,
                top_k: int | None, generator: torch.Generator | None) -> Iterator[Tensor]:
        """The loop of both generators: run the model, choose a token, append it, yield it."""
        context, cache = self.config.context_length, None
        for _ in range(max_new_tokens):
            self._check_mode("generation", cached)  # the caller may have switched it in between
            # Inference mode ends before the yield: what the caller does with a token is theirs.
            with torch.inference_mode():
                if not cached:
                    hidden = self._hidden(token_ids)
                elif cache is None or cache[0][0].shape[2] == context:  # first pass, or cache full
                    hidden, cache = self._hidden_cached(token_ids, None)
                else:
                    hidden, cache = self._hidden_cached(token_ids[:, -1:], cache)
                logits = self.lm_head(hidden[:, -1:])[:, 0].float()  # [B, vocab]
                if not logits.abs().amax() < math.inf:  # false for NaN, too
                    raise RuntimeError("logits are not finite: weights or dtype are at fault")
                token = sample(logits, temperature, top_k, generator)
                token_ids = torch.cat((token_ids, token), dim=1)[:, -context:]
            with torch.inference_mode(False):
                token = token.clone()  # an ordinary tensor, which autograd accepts
            yield token


def sample(logits: Tensor, temperature: float = 0.0, top_k: int | None = None,
           generator: torch.Generator | None = None) -> Tensor:
    """The next token for each row of logits [B, vocab]: int64 [B, 1]. Arguments as in `stream`.

    A logit of -inf bans its token; NaN, +inf or a row with no finite logit is a RuntimeError.
    """
    _check_sampling(temperature, top_k, generator, logits.device)
    logits = logits.float()
    # A NaN counts as the largest of its row: the one check finds NaN, +inf and a row of -inf.
    largest, greedy = logits.max(dim=-1, keepdim=True)  # the lowest index among equals
    if not largest.abs().amax() < math.inf:  # false for NaN, too
        raise RuntimeError("logits must have a finite largest value in every row")
    if temperature == 0:
        return greedy
    if top_k is not None and top_k < logits.shape[-1]:
        order = logits.argsort(dim=-1, descending=True, stable=True)  # lowest index among equals
        logits = logits.scatter(-1, order[:, top_k:], -math.inf)
    # A logit less the largest is at most 0, so the division can overflow to -inf alone: probability
    # 0. The limits keep the temperature from becoming 0 or infinite in float32.
    limits = torch.finfo(torch.float32)
    temperature = min(max(temperature, limits.tiny), limits.max)
    return torch.multinomial(((logits - largest) / temperature).softmax(dim=-1), 1,
                             generator=generator)


def _joined(token_ids: Tensor, new_tokens: Iterable[Tensor]) -> Tensor:
    with torch.inference_mode(False):
        return torch.cat((token_ids.long(), *new_tokens), dim=1)


def _check_token_ids(token_ids: Tensor) -> None:
    if not isinstance(token_ids, Tensor) or token_ids.ndim != 2 or token_ids.numel() == 0:
        given = list(token_ids.shape) if isinstance(token_ids, Tensor) else type(token_ids).__name__
        raise ValueError(f"token IDs must have shape [batch, nonempty sequence], got {given}")
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"token IDs must be int64 or int32, got {token_ids.dtype}")


def _check_sampling(temperature: float, top_k: int | None, generator: torch.Generator | None,
                    device: torch.device) -> None:
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if not number or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a finite number >= 0, got {temperature!r}")
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise ValueError(f"top_k must be None or an integer >= 1, got {top_k!r}")
    # A generator's device may read "cuda" where a tensor's reads "cuda:0", so a tensor is asked.
    where = generator.device if isinstance(generator, torch.Generator) else None
    if generator is not None and (where is None or torch.empty(0, device=where).device != device):
        raise ValueError(f"generator must be on {device}, got {where or repr(generator)}")


def kv_cache_bytes(config: DecoderConfig, length: int, element_size: int) -> int:
    """Bytes of the keys and values of one sequence of `length` positions."""
    return 2 * config.n_layers * config.n_kv_heads * config.head_size * length * element_size


def save_checkpoint(path: str | os.PathLike, model: Decoder, /, **facts: Any) -> None:
    """Write config, weights (in their dtype) and JSON `facts` to one file, all of it or nothing.

    ValueError: facts not JSON, weights that would not load, a path to a folder or special file.
    """
    try:
        facts = json.loads(json.dumps(facts, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint facts must be JSON values: {error}") from error
    weights = {name: weight.detach().cpu() for name, weight in model.named_parameters()}
    content = {"format": 1, "config": asdict(model.config), "weights": weights, "facts": facts}
    file = io.BytesIO()  # in memory: torch.save on a full disk hides the system's error
    torch.save(content, file)
    _restore(file, path)  # what would not load must not replace a file that does
    save_atomically(path, file.getbuffer())


def save_atomically(path: str | os.PathLike, content: bytes | memoryview) -> None:
    """Write a file, but an interrupted save leaves the old one as it was; one saver at a time."""
    path = Path(os.path.realpath(path))  # a link stays a link: the file behind it is replaced
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    partial = Path(f"{path}.partial")  # a fixed name: the next save clears what a killed one left
    try:
        with open(partial, "wb") as file:
            if path.exists():
                partial.chmod(path.stat().st_mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def load_checkpoint(path: str | os.PathLike, device: torch.device | str = "cpu") -> Decoder:
    """The saved model in float32 on `device`, in eval mode.

    Raises FileNotFoundError for a missing file and ValueError for one that is damaged, foreign,
    or holds what does not fit its config; nothing in the file is ever run.
    """
    return _load(path, device)[0]


def load_facts(path: str | os.PathLike) -> dict[str, Any]:
    """The facts saved with a model; the whole file is verified as in `load_checkpoint`."""
    return _load(path, "cpu")[1]


@torch.inference_mode(False)  # inside inference mode, too, the weights are ordinary tensors
def _load(path: str | os.PathLike, device: torch.device | str) -> tuple[Decoder, dict[str, Any]]:
    if os.path.exists(path) and not os.path.isfile(path):  # a missing file is named by `open`
        raise ValueError(f"checkpoint {path} is not a file")
    with open(path, "rb") as file:
        model, facts = _restore(file, path)
    return model.to(device), facts


def _restore(file: BinaryIO, path: str | os.PathLike) -> tuple[Decoder, dict[str, Any]]:
    """The model and the facts in `file`; a ValueError that names `path` for any fault in it."""
    try:
        verified = io.BytesIO()  # a copy, since torch.load itself verifies no checksum
        with zipfile.ZipFile(file) as archive, zipfile.ZipFile(verified, "w") as copy:
            if len(set(archive.namelist())) != len(archive.namelist()):
                raise ValueError("an entry is there twice")
            for entry in archive.infolist():
                copy.writestr(entry.filename, archive.read(entry))
        verified.seek(0)
        return _build(torch.load(verified, map_location="cpu", weights_only=True))
    except Exception as error:  # on damaged bytes zipfile and torch raise errors of many types
        fault = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):
            fault = "not a pickle of tensors and plain values alone; nothing in it was run"
        raise ValueError(f"checkpoint {path}: {fault}") from error


def _build(content: Any) -> tuple[Decoder, dict[str, Any]]:
    """The model and the facts that a checkpoint's content describes."""
    found = content.get("format") if isinstance(content, dict) else None
    if type(found) is not int or found != 1:
        raise ValueError(f"not an octlm checkpoint: format must be 1, got {found!r}")
    given, weights, facts = (content.get(key) for key in ("config", "weights", "facts"))
    if not all(isinstance(part, dict) for part in (given, weights, facts)):
        raise ValueError("config, weights and facts must be dictionaries")
    json.dumps(facts, allow_nan=False)  # raises an error for what is not JSON
    if odd := given.keys() ^ {field.name for field in fields(DecoderConfig)}:
        raise ValueError(f"config fields missing or unexpected: {', '.join(sorted(map(str, odd)))}")
    config = DecoderConfig(**given)
    if config.n_layers > len(weights):  # said before a model of so many layers is built
        raise ValueError(f"{config.n_layers} layers in the config, but {len(weights)} weights")
    unused: dict[int, int] = {}  # bytes of each storage in the file that no weight has taken yet
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            raise ValueError(f"weight {name} must be a floating-point tensor")
        storage = weight.untyped_storage()
        place = storage.data_ptr()
        unused[place] = unused.get(place, storage.nbytes()) - weight.nbytes
        if unused[place] < 0:  # a few numbers spread over a large weight by strides
            raise ValueError(f"weight {name} is not in the file in full")
        weights[name] = weight.to(torch.float32, copy=True).contiguous()
        if not weights[name].isfinite().all():
            raise ValueError(f"weight {name} is not finite")
    with torch.device("meta"):  # shapes alone: no memory, no random numbers
        model = Decoder(config)
    del model.lm_head.weight  # it is the token embedding, and not in the file
    model.load_state_dict(weights, assign=True)  # names what is missing, unexpected, misshapen
    model.lm_head.weight = model.token_embedding.weight
    return model.eval(), facts
