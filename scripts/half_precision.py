"""How often cached and naive greedy tokens part in half precision, and how near the choice was.

    python scripts/half_precision.py

For each of 50 sampled prompts the cached path writes up to the end of the context; one full pass
over that text, of the same dtype, shows every place where it would have chosen another token (the
naive path itself, whose passes grow, may round differently again). Printed as a Markdown table, for
the module as it is and with the logits computed in float32; stderr says how long it will take.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from day5 import say
from octlm import Linear, load_checkpoint

PROMPTS, PROMPT_LENGTH = 50, 9


class Float32Head(torch.nn.Linear):
    """The output head, computed in float32 whatever the weights' dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight.float())


@torch.inference_mode()
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_checkpoint(ROOT / "checkpoints" / "octlm-26m.pt", device)
    context = model.config.context_length
    say(f"{PROMPTS} prompts of {PROMPT_LENGTH} tokens, then {4 * PROMPTS} texts of {context}")
    prompts = [
        model.generate_cached(
            torch.tensor([[1]], device=device), PROMPT_LENGTH - 1, temperature=1.0,
            generator=torch.Generator(device).manual_seed(seed))
        for seed in range(PROMPTS)
    ]
    print("| dtype | logits | prompts that part | places | largest gap | gap 0 |")
    print("|:------|:-------|------------------:|-------:|------------:|------:|", flush=True)
    started, done = time.perf_counter(), 0
    for dtype in (torch.float16, torch.bfloat16):
        model.to(dtype)
        for kind in (Linear, Float32Head):
            model.lm_head.__class__ = kind
            parted, gaps = 0, []
            for prompt in prompts:
                text = model.generate_cached(prompt, context - PROMPT_LENGTH)
                logits = model(text[:, :-1])[0, PROMPT_LENGTH - 1 :].float()
                other = (logits.argmax(dim=-1) != text[0, PROMPT_LENGTH:]).nonzero()[:, 0]
                best = logits[other].topk(2).values
                gaps += (best[:, 0] - best[:, 1]).tolist()
                parted += len(other) > 0
                done += 1
                left = (time.perf_counter() - started) / done * (4 * PROMPTS - done)
                say(f"{dtype}: text {done} of {4 * PROMPTS}, about {left / 60:.0f} min left")
            head = "float32" if kind is Float32Head else "as is"
            print(f"| {dtype} | {head} | {parted} of {PROMPTS} | {len(gaps)} of "
                  f"{PROMPTS * (context - PROMPT_LENGTH):,} | {max(gaps, default=0):.4f} | "
                  f"{sum(gap == 0 for gap in gaps)} |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("half_precision.py: interrupted")
