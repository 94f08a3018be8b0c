"""One cached decoding step by kind of work, and how near it comes to the memory's speed.

    python scripts/where_time_goes.py --dtype float32 --threads 2
    python scripts/where_time_goes.py --before older/octlm.py

CPU, batch 1, greedy, from BOS. First whole runs of 512 tokens, untouched; then one with a timer
around each kind of call, whose medians make the table. The rest is what no timer covers. Past the
context, where every step is a pass over all positions, the naive path runs in turn with the cached
one. An older octlm.py generates in turn with this one, step by step, from the same weights in
memory. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import octlm
from day5 import positive, say

CHECKPOINT = ROOT / "checkpoints" / "octlm-26m.pt"
BOS = torch.tensor([[1]])
TOKENS = 512
KINDS = [  # kind, where the function is looked up (None: in octlm), its name
    ("linear layers", torch.nn.Linear, "__call__"),
    ("attention", F, "scaled_dot_product_attention"),
    ("normalization", F, "rms_norm"), ("RoPE", None, "apply_rope"),
    ("RoPE tables", None, "rope_tables"), ("joining cache and text", torch, "cat"),
    ("choosing the token", None, "sample"),
]

current = ""  # the side whose step is running
spent: dict[tuple[str, str], list[float]] = defaultdict(list)  # by side and kind


def module_from(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("before", path)
    module = sys.modules["before"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step_seconds(models: dict[str, torch.nn.Module], tokens: int) -> dict[str, list[float]]:
    """How long each step of a cached generation took, the sides in turn; the first: the prompt."""
    global current
    streams = {side: model.stream(BOS, tokens) for side, model in models.items()}
    seconds = {side: [] for side in models}
    for _ in range(tokens):
        for current, stream in streams.items():
            start = time.perf_counter()
            next(stream)
            seconds[current].append(time.perf_counter() - start)
    return seconds


@torch.inference_mode()
def at_positions(model: torch.nn.Module) -> list[float]:
    """Milliseconds of the step at position 30 and of the one at 500, 200 times in turn."""
    ids = model.generate_cached(BOS, 500)
    steps = [(ids[:, n : n + 1], model.forward_cached(ids[:, :n])[1]) for n in (30, 500)]
    seconds = [[], []]
    for _ in range(200):
        for (token, cache), times in zip(steps, seconds):
            start = time.perf_counter()
            model.forward_cached(token, cache)
            times.append(time.perf_counter() - start)
    return [statistics.median(times) * 1e3 for times in seconds]


def past_the_context(model: torch.nn.Module) -> list[float]:
    """Milliseconds per token of the naive and of the cached path there, 20 tokens in turn."""
    text = model.generate_cached(BOS, model.config.context_length)
    seconds = {model.stream(text, 20, cached=cached): [] for cached in (False, True)}
    for _ in range(20):
        for stream, times in seconds.items():
            start = time.perf_counter()
            next(stream)
            times.append(time.perf_counter() - start)
    return [statistics.median(times) * 1e3 for times in seconds.values()]


def read_seconds(array: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.dot(array, array)
    return time.perf_counter() - start


def watch(kind: str, owner: object, name: str) -> None:
    function = getattr(owner, name)

    def call(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        spent[current, kind].append(time.perf_counter() - start)
        return result

    setattr(owner, name, call)


def main() -> int:
    parser = argparse.ArgumentParser(description="Where a cached decoding step's time goes.")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--before", type=Path, help="another octlm.py, to be timed in turn")
    args = parser.parse_args()
    if args.before and not args.before.is_file():
        parser.error(f"--before: {args.before} is not a file")
    torch.set_num_threads(args.threads)
    modules = {"octlm": octlm}
    if args.before:
        modules = {"before": module_from(args.before), "after": octlm}
    models = {side: module.load_checkpoint(CHECKPOINT) for side, module in modules.items()}
    shared = octlm.load_checkpoint(CHECKPOINT).to(getattr(torch, args.dtype)).state_dict()
    for model in models.values():
        model.load_state_dict(shared, assign=True)  # one copy, as if each side were alone
        model.lm_head.weight = model.token_embedding.weight
    weights = sum(weight.nbytes for weight in next(iter(models.values())).parameters())
    array = torch.ones(2**26)  # 256 MiB
    step_seconds(models, 32)
    reads, runs = [], []
    started, whole_runs = time.perf_counter(), args.repeats + 2  # the positions take about one
    for run in range(args.repeats):  # the memory and the models in turn
        left = (time.perf_counter() - started) / run * (whole_runs - run) if run else 0
        say(f"run {run + 1} of {args.repeats}" + f", about {left:.0f} s left" * bool(run))
        reads.append(statistics.median(read_seconds(array) for _ in range(5)))
        runs.append(step_seconds(models, TOKENS))
    limit = array.nbytes / statistics.median(reads)
    print(f"{args.dtype}, {args.threads} threads, {TOKENS} tokens; "
          f"a 256 MiB array is read at {limit / 1e9:.1f} GB/s")
    for side in models:
        say(f"{side}: the steps at positions 30 and 500, and past the context")
        rates = [TOKENS / sum(run[side]) for run in runs]
        rate = statistics.median(rates)
        early, late = at_positions(models[side])
        print(f"{side}: {rate:.1f} [{min(rates):.1f}-{max(rates):.1f}] tokens/s, weights at "
              f"{weights * rate / 1e9:.1f} GB/s ({weights * rate / limit:.2f} of the array's), "
              f"step at 30: {early:.2f} ms, at 500: {late:.2f} ({late / early:.2f})")
        naive, cached = past_the_context(models[side])
        print(f"{side}, past the context: naive {naive:.0f} ms per token, cached {cached:.0f} "
              f"({cached / naive:.2f} times as long)")

    for kind, owner, name in KINDS:
        for place in (owner,) if owner else modules.values():
            watch(kind, place, name)
    say(f"one run of {TOKENS} tokens with a timer around each kind of call")
    steps = step_seconds(models, TOKENS)
    whole = {side: statistics.median(steps[side]) * 1e6 for side in models}
    rest = dict(whole)
    print(f"\n| kind of work | calls | {' | '.join(f'{side}, µs' for side in models)} |")
    print("|:-------------|------:|" + "---:|" * len(models))
    for kind, _, _ in KINDS:
        cells = []
        for side in models:
            # Calls of one kind differ in size but recur with each step: the median over the steps.
            calls = round(len(spent[side, kind]) / TOKENS)
            per_step = [sum(spent[side, kind][i : i + calls])
                        for i in range(0, len(spent[side, kind]), calls)]
            cells.append(statistics.median(per_step) * 1e6)
            rest[side] -= cells[-1]
        print(f"| {kind} | {calls} | {' | '.join(f'{cell:,.0f}' for cell in cells)} |")
    for kind, row in (("the rest: Python, views, sums, SiLU", rest), ("one step", whole)):
        print(f"| {kind} | | {' | '.join(f'{row[side]:,.0f}' for side in models)} |")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("where_time_goes.py: interrupted")
