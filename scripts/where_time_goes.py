"""One cached decoding step by kind of work, and how near it comes to the memory's speed.

    python scripts/where_time_goes.py --dtype float32 --threads 2

CPU, batch 1, greedy, from BOS. First whole runs of 512 tokens, untouched; then one with a timer
around each kind of call, whose medians make the table. The rest is what no timer covers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import octlm
from day5 import positive

CHECKPOINT = ROOT / "checkpoints" / "octlm-26m.pt"
BOS = torch.tensor([[1]])
KINDS = [  # kind, where the function is looked up, its name
    ("linear layers", torch.nn.Linear, "__call__"),
    ("attention", F, "scaled_dot_product_attention"),
    ("normalization", F, "rms_norm"), ("RoPE", octlm, "apply_rope"),
    ("RoPE tables", octlm, "rope_tables"), ("joining cache and text", torch, "cat"),
    ("choosing the token", octlm, "sample"),
]


def step_seconds(model: octlm.Decoder, tokens: int) -> list[float]:
    """How long each step of a cached generation took; the first is the prompt's."""
    times = [time.perf_counter()]
    for _ in model.stream(BOS, tokens):
        times.append(time.perf_counter())
    return [after - before for before, after in zip(times, times[1:])]


def read_seconds(array: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.dot(array, array)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description="Where a cached decoding step's time goes.")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--repeats", type=positive, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = octlm.load_checkpoint(CHECKPOINT).to(getattr(torch, args.dtype))
    array = torch.ones(2**26)  # 256 MiB
    weights = sum(weight.nbytes for weight in model.parameters())
    step_seconds(model, 32)
    reads, rates, early, late = [], [], [], []
    for _ in range(args.repeats):  # the memory and the model in turn
        reads.append(statistics.median(read_seconds(array) for _ in range(5)))
        steps = step_seconds(model, 512)
        rates.append(len(steps) / sum(steps))
        early.append(statistics.median(steps[20:40]))
        late.append(statistics.median(steps[490:510]))
    rate, limit = statistics.median(rates), array.nbytes / statistics.median(reads)
    print(f"{args.dtype}, {args.threads} threads, 512 tokens: {rate:.1f} "
          f"[{min(rates):.1f}-{max(rates):.1f}] tokens/s")
    print(f"weights read at {weights * rate / 1e9:.1f} GB/s, a 256 MiB array at "
          f"{limit / 1e9:.1f}: {weights * rate / limit:.2f} of it")
    first, last = statistics.median(early), statistics.median(late)
    print(f"step at position 30: {first * 1e3:.2f} ms, at 500: {last * 1e3:.2f} ms, "
          f"ratio {last / first:.2f}\n")

    seconds: dict[str, list[float]] = defaultdict(list)

    def watched(kind: str, function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[kind].append(time.perf_counter() - start)
            return result
        return call

    for kind, owner, name in KINDS:
        setattr(owner, name, watched(kind, getattr(owner, name)))
    steps = step_seconds(model, 512)
    whole = statistics.median(steps) * 1e6
    print("| kind of work | calls | µs |\n|:-------------|------:|---:|")
    rest = whole
    for kind, _, _ in KINDS:
        calls = len(seconds[kind]) / len(steps)
        # Calls of one kind differ in size but recur with each step: the median over the steps.
        per_step = [sum(seconds[kind][i : i + round(calls)])
                    for i in range(0, len(seconds[kind]), round(calls))]
        spent = statistics.median(per_step) * 1e6
        rest -= spent
        print(f"| {kind} | {calls:.0f} | {spent:,.0f} |")
    print(f"| the rest: Python, views, sums, SiLU | | {rest:,.0f} |\n| one step | | {whole:,.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
