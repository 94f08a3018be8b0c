"""Choose the best checkpoint whose greedy text is sure in float16.

    python scripts/choose_checkpoint.py CHECKPOINT [CHECKPOINT ...] --heldout FILE [--out FILE]
        [--random N]

Candidates are the checkpoints, named from the oldest to the newest, and two averages of each last
two or more: with equal weights and with weights that rise 1, 2, 3 and so on. With --random, also
those of N random averages whose greedy text passes the first two tests below: a second a try, and
one search found its first after 402 tries, another after 2,722. The candidates within 0.003 bits
per byte of the best are then examined, half a minute each, on the greedy text from BOS to the end
of the context. One fits if the two best logits are always 0.03 apart or more in float32, the text
has 120 different tokens or more, float16 writes the same text, and so do 20 passes in which every
output of a linear layer is shifted at random by up to half a float16 step. The best that fits goes
to --out, a file that is not there yet.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checkpoints")]

from train import bits_per_byte, check_folder, load_tokenizer, read_documents

from day5 import say
from octlm import Decoder, load_checkpoint, load_facts, save_checkpoint

WITHIN, GAP, DIFFERENT, PASSES = 0.003, 0.03, 120, 20


def average(models: Sequence[Decoder], weights: Sequence[int]) -> Decoder:
    """The weighted mean of the models' parameters, rounded to float16 as it would be shipped."""
    mean = copy.deepcopy(models[0])
    with torch.no_grad():
        for target, *sources in zip(mean.parameters(), *(model.parameters() for model in models)):
            total = sum(w * source for w, source in zip(weights, sources) if w)
            target.copy_(total / sum(weights))
    return mean.half().float()


def shift(layer: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    """A forward hook: moves each output at random by up to half a float16 step."""
    # Below 2 ** -14, float16 steps shrink no more.
    exponent = torch.frexp(output).exponent.clamp(min=-13).masked_fill(output == 0, -13)
    return output + torch.ldexp(torch.rand_like(output) - 0.5, exponent - 11)


@torch.inference_mode()
def is_sure(model: Decoder, bos: int) -> bool:
    """Whether the two best logits are GAP or more apart at each step of the greedy text, and it has
    DIFFERENT different tokens or more. Stops at the first step that is not."""
    token, cache, seen = torch.tensor([[bos]]), None, set()
    for _ in range(model.config.context_length):
        logits, cache = model.forward_cached(token, cache)
        best = logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < GAP:
            return False
        token = best.indices[None, :1]
        seen.add(token.item())
    return len(seen) >= DIFFERENT


@torch.inference_mode()
def examine(model: Decoder, bos: int) -> tuple[float, int, bool, int]:
    """Of the greedy text from BOS: the smallest gap between the two best logits, the number of
    different tokens, whether float16 writes the same, and how many of the shifted passes do.

    A pass over the whole text shows whether each token would have been chosen again.
    """
    start = torch.tensor([[bos]])
    text = model.generate_cached(start, model.config.context_length)
    best = model(text[:, :-1]).topk(2).values
    gap = (best[..., 0] - best[..., 1]).min().item()
    hooks = [module.register_forward_hook(shift) for module in model.modules()
             if isinstance(module, nn.Linear)]
    torch.manual_seed(0)
    same = sum(torch.equal(model(text[:, :-1]).argmax(-1), text[:, 1:]) for _ in range(PASSES))
    for hook in hooks:
        hook.remove()
    in_half = copy.deepcopy(model).half().generate_cached(start, model.config.context_length)
    return gap, len(text[0, 1:].unique()), torch.equal(in_half, text), same


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Choose the best that is sure in float16.")
    parser.add_argument("checkpoints", nargs="+", type=Path, help="from the oldest to the newest")
    parser.add_argument("--heldout", type=Path, required=True, help="text to score")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "checkpoints" / "tokenizer.model")
    parser.add_argument("--out", type=Path, help="checkpoint to write")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random averages to try")
    args = parser.parse_args(argv)
    if args.random < 0:
        parser.error("--random must be 0 or positive")
    try:
        if args.out:
            check_folder(args.out)
            if os.path.lexists(args.out):
                raise FileExistsError(f"{args.out} exists: move it away first")
        tokenizer, heldout = load_tokenizer(args.tokenizer), read_documents(args.heldout)
        models = [load_checkpoint(path) for path in args.checkpoints]
        if len({model.config for model in models}) > 1:
            raise ValueError("the checkpoints differ in their config")
        size, expected = models[0].config.vocab_size, tokenizer.vocab_size()
        if size != expected:
            raise ValueError(f"the checkpoints have {size} tokens, the tokenizer {expected}")
        names, count = [path.stem for path in args.checkpoints], len(models)
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two checkpoints are named {twice[0]}")
        # Of each candidate the weights of the models: so many means would fill the memory.
        candidates = {name: [int(i == k) for k in range(count)] for i, name in enumerate(names)}
        for last in range(2, count + 1):
            older = [0] * (count - last)
            candidates[f"mean of the last {last}"] = older + [1] * last
            candidates[f"rising mean of the last {last}"] = [*older, *range(1, last + 1)]
        if args.random:
            say(f"trying {args.random} random averages, about {args.random / 60:.0f} min")
        draw = random.Random(0)
        for tried in range(1, args.random + 1):
            weights = [0] * count
            for i in draw.sample(range(count), draw.randint(1, min(5, count))):
                weights[i] = draw.randint(1, 9)
            if is_sure(average(models, weights), tokenizer.bos_id()):
                say(f"random average {tried} of {args.random} is sure")
                parts = (f"{weight} x {name}" for weight, name in zip(weights, names) if weight)
                candidates[f"mean of {', '.join(parts)}"] = weights
        scores, start = {}, time.perf_counter()
        for done, (name, weights) in enumerate(candidates.items()):
            left = (time.perf_counter() - start) / done * (len(candidates) - done) if done else 0
            say(f"scoring {name}, {done + 1} of {len(candidates)}"
                + f", about {left / 60:.0f} min left" * bool(done))
            scores[name] = bits_per_byte(average(models, weights), tokenizer, heldout)
        print("| candidate | bits per byte | smallest gap | different tokens | float16 equal | "
              "shifted equal |\n|:--|--:|--:|--:|:--|--:|", flush=True)
        chosen = None
        for name, score in sorted(scores.items(), key=lambda item: item[1]):
            cells = ["", "", "", ""]
            if score <= min(scores.values()) + WITHIN:
                model = average(models, candidates[name])
                gap, different, equal, same = examine(model, tokenizer.bos_id())
                cells = [f"{gap:.4f}", different, "yes" if equal else "no", f"{same} of {PASSES}"]
                fits = gap >= GAP and different >= DIFFERENT and equal and same == PASSES
                chosen = chosen or (name if fits else None)
            print(f"| {name} | {score:.4f} |", *(f"{cell} |" for cell in cells), flush=True)
        if chosen is None:
            raise ValueError("no candidate fits")
        print(f"\nchosen: {chosen}")
        if args.out:
            facts = load_facts(args.checkpoints[-1])
            facts |= {"chosen": chosen, "bits_per_byte": scores[chosen]}
            save_checkpoint(args.out, average(models, candidates[chosen]).half(), **facts)
    except KeyboardInterrupt:
        say("choose_checkpoint.py: interrupted; nothing was written")
        return 1
    except (OSError, ValueError, RuntimeError) as error:
        say(f"choose_checkpoint.py: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
