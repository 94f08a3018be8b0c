"""Time octlm's generators against Hugging Face transformers' on the same weights.

    pip install transformers==5.24.0
    python scripts/compare_transformers.py --dtype float32 --threads 2

Batch 1, greedy, from BOS, all sides in turn in one process, on the CPU. The checkpoint becomes a
Llama: RoPE there turns channel i with i + head_size / 2, so the rows of its query and key weights
are reordered. "Without slices" is octlm with PyTorch's own linear layers in place of its `Linear`.
Exit status 1 if the tokens differ in float32.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from day5 import positive
from octlm import Decoder, Linear, load_checkpoint

BOS = torch.tensor([[1]])
CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints" / "octlm-26m.pt"


def as_llama(model: Decoder) -> transformers.LlamaForCausalLM:
    """The same model, weights copied, as a transformers Llama."""
    config = model.config
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=config.vocab_size, max_position_embeddings=config.context_length,
        num_hidden_layers=config.n_layers, hidden_size=config.d_model,
        num_attention_heads=config.n_heads, num_key_value_heads=config.n_kv_heads,
        intermediate_size=config.d_ff, rms_norm_eps=config.norm_eps, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    ))

    def halves(weight: Tensor) -> Tensor:  # channels (2i, 2i + 1) to (i, i + head_size / 2)
        pairs = weight.view(-1, config.head_size // 2, 2, config.d_model)
        return pairs.transpose(1, 2).reshape(weight.shape)

    weights = {"model.embed_tokens.weight": model.token_embedding.weight,
               "model.norm.weight": model.final_norm.weight}
    for layer, block in enumerate(model.blocks):
        weights |= {f"model.layers.{layer}.{name}.weight": weight for name, weight in (
            ("input_layernorm", block.attention_norm.weight),
            ("self_attn.q_proj", halves(block.attention.query.weight)),
            ("self_attn.k_proj", halves(block.attention.key.weight)),
            ("self_attn.v_proj", block.attention.value.weight),
            ("self_attn.o_proj", block.attention.output.weight),
            ("post_attention_layernorm", block.feed_forward_norm.weight),
            ("mlp.gate_proj", block.feed_forward.gate.weight),
            ("mlp.up_proj", block.feed_forward.up.weight),
            ("mlp.down_proj", block.feed_forward.down.weight),
        )}
    weights["lm_head.weight"] = model.token_embedding.weight
    llama.load_state_dict(weights)
    return llama.eval()


def timed(call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def race(title: str, sides: dict[str, Callable[[int], Tensor]], length: int, repeats: int,
         exact: bool) -> None:
    """Time the sides in turn; prints tokens per second, and octlm's ratio to each.

    Both are medians; a ratio is that of two neighbours in time, as machines drift.
    """
    for generate in sides.values():
        generate(8)
    seconds = {name: [] for name in sides}
    for _ in range(repeats):
        outputs = []
        for name, generate in sides.items():
            tokens, elapsed = timed(lambda generate=generate: generate(length))
            outputs.append(tokens)
            seconds[name].append(elapsed)
        if exact and not all(torch.equal(outputs[0], other) for other in outputs):
            sys.exit(f"{title}: the tokens differ")
    print(f"{title}, {length} tokens")
    for name, values in seconds.items():
        middle = statistics.median(values)
        low, high = length / max(values), length / min(values)
        ratio = statistics.median(other / our for other, our in zip(values, seconds["octlm"]))
        print(f"  {name:28} {length / middle:6.1f} [{low:.1f}-{high:.1f}] tokens/s"
              f"  octlm/this {ratio:.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="octlm against transformers, in turn.")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--repeats", type=positive, default=9)
    parser.add_argument("--naive-repeats", type=positive, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, args.dtype)
    model = load_checkpoint(CHECKPOINT)
    llama = as_llama(model).to(dtype)
    # Half precision would have rounded its frequencies; octlm's stay in float32.
    llama.model.rotary_emb = type(llama.model.rotary_emb)(llama.config)
    model = model.to(dtype)
    whole = copy.deepcopy(model)
    for module in whole.modules():
        if isinstance(module, Linear):
            module.__class__ = torch.nn.Linear
    exact = dtype == torch.float32

    print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}, {args.dtype}, "
          f"{args.threads} threads")

    def theirs(**cache) -> Callable[[int], Tensor]:
        return lambda length: llama.generate(
            BOS, max_new_tokens=length, do_sample=False, attention_mask=torch.ones_like(BOS),
            disable_compile=True, **cache)

    race("cached", {
        "octlm": lambda length: model.generate_cached(BOS, length),
        "octlm without slices": lambda length: whole.generate_cached(BOS, length),
        "transformers, dynamic cache": theirs(),
        "transformers, static cache": theirs(cache_implementation="static"),
    }, 256, args.repeats, exact)
    race("naive", {
        "octlm": lambda length: model.generate(BOS, length),
        "transformers, no cache": theirs(use_cache=False),
    }, 512, args.naive_repeats, exact)
    return 0


if __name__ == "__main__":
    sys.exit(main())
