"""Time octlm's generators against other engines on the same weights, on the CPU.

    pip install transformers==5.24.0
    python scripts/compare_engines.py --dtype float32 float16 --threads 2

times it against Hugging Face transformers: 256 tokens with a cache, then 512 without. Or against
llama.cpp, 128 tokens, with GGUF files made from the exported folder (docs/export.md):

    pip install xllamacpp
    python scripts/compare_engines.py --dtype float32 float16 --threads 2 --gguf FILE [FILE ...]

Batch 1, greedy, from BOS, all sides in turn in one process. "Without slices" is octlm with
PyTorch's own linear layers in place of its `Linear`. Exit status 1 if transformers' tokens in
float32 differ from octlm's; for a GGUF file the number of equal first tokens is said.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from export import llama_config, llama_weights

from day5 import CHECKPOINTS, DTYPES, positive, say
from octlm import Decoder, Linear, load_checkpoint

BOS = torch.tensor([[1]])
Generate = Callable[[int], list[int]]  # the new tokens; octlm treats EOS like any other


def race(title: str, sides: dict[str, Generate], ours: Sequence[str], length: int, repeats: int,
         exact: bool = False) -> None:
    """Time the sides in turn; prints tokens per second, and the ratio of each of `ours` to each.

    Speeds are medians. A ratio is the median of those within each round, as machines drift.
    Raises RuntimeError if `exact` and the tokens differ.
    """
    say(f"{title}: {repeats} rounds of {length} tokens from each of {', '.join(sides)}")
    for generate in sides.values():
        generate(8)
    seconds = {name: [] for name in sides}
    for repeat in range(1, repeats + 1):
        tokens = {}
        for name, generate in sides.items():
            start = time.perf_counter()
            tokens[name] = generate(length)
            seconds[name].append(time.perf_counter() - start)
        say(f"round {repeat} of {repeats}")
    same = {name: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1],
                                           zip(tokens[ours[0]], tokens[name])))
            for name in sides}
    if exact and min(same.values()) < length:
        raise RuntimeError(f"{title}: the tokens differ")
    print(f"{title}, {length} tokens")
    for name, values in seconds.items():
        print(f"  {name:28} {length / statistics.median(values):6.1f} "
              f"[{length / max(values):.1f}-{length / min(values):.1f}] tokens/s; "
              f"first {same[name]} tokens equal")
        for our in ours:
            ratios = [other / mine for other, mine in zip(values, seconds[our])]
            if our != name:
                print(f"  {'':28} {our} / this {statistics.median(ratios):.2f} "
                      f"[{min(ratios):.2f}-{max(ratios):.2f}]", flush=True)


def octlm_side(model: Decoder, cached: bool = True) -> Generate:
    generate = model.generate_cached if cached else model.generate
    return lambda length: generate(BOS, length)[0, 1:].tolist()


def against_transformers(model: Decoder, word: str, repeats: int, naive_repeats: int) -> None:
    import transformers

    print(f"transformers {transformers.__version__}, {word}")
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        **llama_config(model.config), bos_token_id=1, eos_token_id=None, pad_token_id=0)
    llama = transformers.LlamaForCausalLM(config).eval()
    weights = llama_weights(model)
    llama.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    model, llama = model.to(DTYPES[word]), llama.to(DTYPES[word])
    # Half precision would have rounded its frequencies; octlm's stay in float32.
    llama.model.rotary_emb = type(llama.model.rotary_emb)(config)
    whole = copy.deepcopy(model)
    for module in whole.modules():
        if isinstance(module, Linear):
            module.__class__ = torch.nn.Linear

    def theirs(**cache) -> Generate:
        return lambda length: llama.generate(
            BOS, max_new_tokens=length, do_sample=False, attention_mask=torch.ones_like(BOS),
            disable_compile=True, **cache)[0, 1:].tolist()

    race("cached", {
        "octlm": octlm_side(model),
        "octlm without slices": octlm_side(whole),
        "transformers, dynamic cache": theirs(),
        "transformers, static cache": theirs(cache_implementation="static"),
    }, ["octlm"], 256, repeats, exact=word == "float32")
    race("naive", {
        "octlm": octlm_side(model, cached=False),
        "transformers, no cache": theirs(use_cache=False),
    }, ["octlm"], 512, naive_repeats, exact=word == "float32")


def llama_cpp_side(path: Path, threads: int) -> Generate:
    """llama.cpp's server in this process. Its `ignore_eos` bans EOS, which octlm may choose."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.verbosity = 512, 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def generate(length: int) -> list[int]:
        body = {"prompt": BOS[0].tolist(), "n_predict": length, "temperature": 0.0,
                "ignore_eos": True, "return_tokens": True, "cache_prompt": False}
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(),
            {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]

    return generate


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="octlm against transformers or llama.cpp.")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--repeats", type=positive, default=9)
    parser.add_argument("--naive-repeats", type=positive, default=3)
    parser.add_argument("--gguf", nargs="+", type=Path, default=[], metavar="FILE",
                        help="against llama.cpp with these files, in place of transformers")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    say(f"PyTorch {torch.__version__}, {args.threads} threads")
    try:
        for path in args.gguf:
            if not path.is_file():
                raise FileNotFoundError(f"{path} is not a file")
        model = load_checkpoint(CHECKPOINTS / "octlm-26m.pt")
        if args.gguf:
            ours = {f"octlm {word}": octlm_side(copy.deepcopy(model).to(DTYPES[word]))
                    for word in args.dtype}
            theirs = {f"llama.cpp {path.name}": llama_cpp_side(path, args.threads)
                      for path in args.gguf}
            race("cached", ours | theirs, list(ours), 128, args.repeats)
            return 0
        for word in args.dtype:
            against_transformers(copy.deepcopy(model), word, args.repeats, args.naive_repeats)
    except KeyboardInterrupt:
        say("compare_engines.py: interrupted")
        return 1
    except ModuleNotFoundError as error:
        say(f"compare_engines.py: {error}: pip install transformers==5.24.0 xllamacpp")
        return 1
    except (OSError, ValueError, RuntimeError) as error:
        say(f"compare_engines.py: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
