"""Break octlm on purpose, one way at a time, and print which test notices.

    python scripts/break_it.py > docs/break_it.md

Each break is one replacement in a copy of the working tree; the test file runs there and stops at
its first failure. First the whole suite runs in an unbroken copy; from the first break on, stderr
says about how long the rest takes. The copies are removed, also when the run is interrupted or
killed. Exit status 0 if every break was noticed and the unbroken copy passes.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BREAKS = [  # what, file, the text to replace (found exactly once), its replacement
    ("mask off by one", "octlm.py", "mask = column <= column[-new:, None]",
     "mask = column < column[-new:, None]"),
    ("upper-left mask", "octlm.py", "mask = column <= column[-new:, None]",
     "mask = column <= column[:new, None]"),
    ("positions from zero in a step", "octlm.py", "float(config.rope_base), start)",
     "float(config.rope_base), 0)"),
    ("keys rotated twice", "octlm.py",
     "query, key = apply_rope(query, *rope), apply_rope(key, *rope)",
     "query, key = apply_rope(query, *rope), apply_rope(apply_rope(key, *rope), *rope)"),
    ("wrong head mapping", "octlm.py",
     "rows = query.reshape(*key.shape[:2], -1, key.shape[3])",
     "rows = query.unflatten(1, (-1, key.shape[1])).transpose(1, 2).flatten(2, 3)"),
    ("keys repeated in the wrong order", "octlm.py",
     "x.unsqueeze(2).expand(-1, -1, n_heads // x.shape[1], -1, -1).flatten(1, 2)",
     "x.repeat(1, n_heads // x.shape[1], 1, 1)"),
    ("last token dropped", "octlm.py",
     "token_ids = torch.cat((token_ids, token), dim=1)[:, -context:]",
     "token_ids = torch.cat((token_ids, token), dim=1)[:, -context:][:, :-1]"),
    ("stale cache reused", "octlm.py",
     "                    hidden, cache = self._hidden_cached(token_ids, None)\n",
     "                    cache = cache and [(k[:, :, 1:], v[:, :, 1:]) for k, v in cache]\n"
     "                    new = token_ids[:, -1:] if cache else token_ids\n"
     "                    hidden, cache = self._hidden_cached(new, cache)\n"),
    ("cache changed in place", "octlm.py", "torch.cat((cache[1], value), dim=2)\n",
     "torch.cat((cache[1], value), dim=2)\n            cache[0].mul_(1.0001)\n"),
    ("output slices in the wrong order", "octlm.py", "-1, -1), slices.mT)",
     "-1, -1), slices.mT).flip(0)"),
    ("one token too many", "octlm.py", "for _ in range(max_new_tokens):",
     "for _ in range(max_new_tokens + 1):"),
    ("bytes off by one layer", "octlm.py", "return 2 * config.n_layers * config.n_kv_heads",
     "return 2 * (config.n_layers - 1) * config.n_kv_heads"),
    ("timer around nothing", "day5.py",
     "    start = time.perf_counter()\n    tokens = generate(prompt, length)\n",
     "    tokens = generate(prompt, length)\n    start = time.perf_counter()\n"),
    ("device not synchronized", "day5.py",
     "    synchronize(prompt.device)\n    return tokens", "    return tokens"),
    ("window ignored", "octlm.py", "window = config.attention_window or length", "window = length"),
    ("compression ignored", "octlm.py", "last <= row - window", "last < 0"),
    ("manual attention not causal", "octlm.py", "scores.masked_fill(~mask, -math.inf)", "scores"),
    ("rope_scale ignored", "octlm.py", "device=device) / scale", "device=device)"),
    ("top_k ignored", "octlm.py",
     "if top_k is not None and top_k < logits.shape[-1]:", "if False:"),
    ("temperature ignored", "octlm.py",
     "temperature = min(max(temperature, limits.tiny), limits.max)", "temperature = 1.0"),
    ("always greedy", "octlm.py", "if temperature == 0:", "if True:"),
    ("every position projected", "octlm.py", "self.lm_head(hidden[:, -1:])[:, 0]",
     "self.lm_head(hidden)[:, -1]"),
    ("a weight spread by strides", "octlm.py", "if unused[place] < 0:", "if False:"),
    ("an entry twice in the file", "octlm.py",
     "if len(set(archive.namelist())) != len(archive.namelist()):", "if False:"),
    ("saved without syncing", "octlm.py", "            os.fsync(file.fileno())\n", ""),
    ("mean instead of median", "day5.py",
     "naive, cached = statistics.median(seconds[False]), statistics.median(seconds[True])",
     "naive, cached = statistics.mean(seconds[False]), statistics.mean(seconds[True])"),
    ("only the first repeat compared", "day5.py",
     "all(torch.equal(outputs[0], other) for other in outputs)",
     "torch.equal(outputs[0], outputs[1])"),
    ("--threads ignored", "day5.py", "        torch.set_num_threads(args.threads)\n",
     "        pass\n"),
    ("--no-cache ignored", "day5.py", "cached=not args.no_cache", "cached=True"),
    ("largest logit difference with its sign", "day5.py", "- naive).abs().max()",
     "- naive).max()"),
    ("--out tried without writing", "day5.py", 'append_line(args.out, "\\n", first=True)',
     'args.out.open("x").close()'),
    ("rows not synced to the disk", "day5.py", "            os.fsync(file.fileno())\n", ""),
    ("a code-running pickle allowed", "octlm.py",
     'map_location="cpu", weights_only=True', 'map_location="cpu", weights_only=False'),
]


def first_failure(folder: Path) -> str | None:
    """The first test that fails in that copy, or None if all pass.

    The tests of this script are left out: in a broken copy it misses the text that it replaces.
    """
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "test_octlm.py",
         "-k", "not break_it",
         f"--basetemp={folder.parent / 'pytest'}"],  # removed with the copy
        cwd=folder, capture_output=True, text=True,
    )
    if result.returncode == 0:
        return None
    failed = re.search(r"^FAILED test_octlm\.py::(\w+)", result.stdout, re.MULTILINE)
    if failed is None:  # the copy does not even import: nothing was tested
        raise RuntimeError(result.stdout + result.stderr)
    return failed[1]


def main() -> int:
    unnoticed = 0
    for what, name, old, _ in BREAKS:
        if (ROOT / name).read_text(encoding="utf-8").count(old) != 1:
            print(f"{name} no longer holds what '{what}' replaces", file=sys.stderr)
            return 1
    for name in ("SIGTERM", "SIGHUP"):  # otherwise they would end Python with no clean-up
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: sys.exit("break_it.py: killed"))
    print("| broken on purpose | first test that fails |\n|:--|:--|", flush=True)
    print("the whole suite in an unbroken copy: about two minutes on two idle cores",
          file=sys.stderr, flush=True)
    for number, (what, name, old, new) in enumerate([("nothing", "octlm.py", "", ""), *BREAKS]):
        if number == 1:
            started = time.perf_counter()
        if number > 0:
            average = (time.perf_counter() - started) / max(number - 1, 1)
            left = f", about {average * (len(BREAKS) - number + 1) / 60:.0f} min left"
            print(f"break {number} of {len(BREAKS)}: {what}{left * (number > 1)}",
                  file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "octlm"
            shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__"))
            if old:
                source = (folder / name).read_text(encoding="utf-8")
                (folder / name).write_text(source.replace(old, new), encoding="utf-8")
            failed = first_failure(folder)
        unnoticed += (failed is None) == bool(old)
        print(f"| {what} | {failed or 'none'} |", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("break_it.py: interrupted")
