"""Break octlm on purpose, one way at a time, and see whether the test that guards it notices.

    python scripts/break_it.py > docs/break_it.md

Each break is one replacement in a copy of the working tree, in which the guarding test alone then
runs. First the whole suite runs in an unbroken copy; from the first break on, stderr says about how
long the rest takes. The copies are removed, also when the run is interrupted or killed. Exit status
0 if every break was noticed and the unbroken copy passes.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BREAKS = [  # what, the test that guards it, file, the text to replace (found once), its replacement
    ("mask off by one", "test_every_chunking_equals_the_full_pass",
     "octlm.py", "mask = column <= column[-new:, None]",
     "mask = column < column[-new:, None]"),
    ("upper-left mask", "test_every_chunking_equals_the_full_pass",
     "octlm.py", "mask = column <= column[-new:, None]",
     "mask = column <= column[:new, None]"),
    ("positions from zero in a step", "test_every_chunking_equals_the_full_pass",
     "octlm.py", "float(config.rope_base), start)",
     "float(config.rope_base), 0)"),
    ("keys rotated twice", "test_keys_are_saved_rotated",
     "octlm.py",
     "query, key = apply_rope(query, *rope), apply_rope(key, *rope)",
     "query, key = apply_rope(query, *rope), apply_rope(apply_rope(key, *rope), *rope)"),
    ("wrong head mapping", "test_every_chunking_equals_the_full_pass",
     "octlm.py",
     "rows = query.reshape(*key.shape[:2], -1, key.shape[3])",
     "rows = query.unflatten(1, (-1, key.shape[1])).transpose(1, 2).flatten(2, 3)"),
    ("keys repeated in the wrong order", "test_full_pass_equals_the_loops",
     "octlm.py",
     "x.unsqueeze(2).expand(-1, -1, n_heads // x.shape[1], -1, -1).flatten(1, 2)",
     "x.repeat(1, n_heads // x.shape[1], 1, 1)"),
    ("last token dropped", "test_generators_agree_across_the_context",
     "octlm.py",
     "token_ids = torch.cat((token_ids, token), dim=1)[:, -context:]",
     "token_ids = torch.cat((token_ids, token), dim=1)[:, -context:][:, :-1]"),
    ("stale cache reused", "test_generators_agree_across_the_context",
     "octlm.py",
     "                    hidden, cache = self._hidden_cached(token_ids, None)\n",
     "                    cache = cache and [(k[:, :, 1:], v[:, :, 1:]) for k, v in cache]\n"
     "                    new = token_ids[:, -1:] if cache else token_ids\n"
     "                    hidden, cache = self._hidden_cached(new, cache)\n"),
    ("cache changed in place", "test_the_cache_is_a_value",
     "octlm.py", "torch.cat((cache[1], value), dim=2)\n",
     "torch.cat((cache[1], value), dim=2)\n            cache[0].mul_(1.0001)\n"),
    ("output slices in the wrong order", "test_linear_layers",
     "octlm.py", "-1, -1), slices.mT)",
     "-1, -1), slices.mT).flip(0)"),
    ("one token too many", "test_generators_agree_across_the_context",
     "octlm.py", "for _ in range(max_new_tokens):",
     "for _ in range(max_new_tokens + 1):"),
    ("bytes off by one layer", "test_bytes_held_are_the_formula",
     "octlm.py", "return 2 * config.n_layers * config.n_kv_heads",
     "return 2 * (config.n_layers - 1) * config.n_kv_heads"),
    ("timer around nothing", "test_the_timer_waits_for_the_device",
     "day5.py",
     "    start = time.perf_counter()\n    tokens = generate(prompt, length)\n",
     "    tokens = generate(prompt, length)\n    start = time.perf_counter()\n"),
    ("device not synchronized", "test_the_timer_waits_for_the_device",
     "day5.py",
     "    synchronize(prompt.device)\n    return tokens", "    return tokens"),
    ("window ignored", "test_full_pass_equals_the_loops",
     "octlm.py", "window = config.attention_window or length", "window = length"),
    ("compression ignored", "test_full_pass_equals_the_loops",
     "octlm.py", "last <= row - window", "last < 0"),
    ("manual attention not causal", "test_full_pass_equals_the_loops",
     "octlm.py", "scores.masked_fill(~mask, -math.inf)", "scores"),
    ("rope_scale ignored", "test_rope_tables",
     "octlm.py", "device=device) / scale", "device=device)"),
    ("top_k ignored", "test_top_k_keeps_exactly_k_lowest_index_first",
     "octlm.py",
     "if top_k is not None and top_k < logits.shape[-1]:", "if False:"),
    ("temperature ignored", "test_sample_draws_from_the_softmax",
     "octlm.py",
     "temperature = min(max(temperature, limits.tiny), limits.max)", "temperature = 1.0"),
    ("always greedy", "test_sample_draws_from_the_softmax",
     "octlm.py", "if temperature == 0:", "if True:"),
    ("every position projected", "test_the_last_position_alone_meets_the_vocabulary",
     "octlm.py", "self.lm_head(hidden[:, -1:])[:, 0]",
     "self.lm_head(hidden)[:, -1]"),
    ("a weight spread by strides", "test_a_weight_that_is_not_in_the_file_in_full",
     "octlm.py", "if unused[place] < 0:", "if False:"),
    ("an entry twice in the file", "test_load_refuses_damaged_files",
     "octlm.py",
     "if len(set(archive.namelist())) != len(archive.namelist()):", "if False:"),
    ("saved without syncing", "test_a_save_is_synced_before_it_is_renamed",
     "octlm.py", "            os.fsync(file.fileno())\n", ""),
    ("mean instead of median", "test_the_cache_stage_on_a_chosen_clock",
     "day5.py",
     "naive, cached = statistics.median(seconds[False]), statistics.median(seconds[True])",
     "naive, cached = statistics.mean(seconds[False]), statistics.mean(seconds[True])"),
    ("only the first repeat compared", "test_a_difference_in_any_repeat",
     "day5.py",
     "all(torch.equal(outputs[0], other) for other in outputs)",
     "torch.equal(outputs[0], outputs[1])"),
    ("--threads ignored", "test_cache_stage",
     "day5.py", "        torch.set_num_threads(args.threads)\n",
     "        pass\n"),
    ("--no-cache ignored", "test_generate_gives_the_same_text_without_cache",
     "day5.py", "cached=not args.no_cache", "cached=True"),
    ("largest logit difference with its sign", "test_max_logit_difference_is_over_all_positions",
     "day5.py", "- naive).abs().max()",
     "- naive).max()"),
    ("--out tried without writing", "test_out_is_tried_before_anything_is_loaded",
     "day5.py", 'append_line(args.out, "\\n", first=True)',
     'args.out.open("x").close()'),
    ("rows not synced to the disk", "test_the_cache_stage_on_a_chosen_clock",
     "day5.py", "            os.fsync(file.fileno())\n", ""),
    ("a code-running pickle allowed", "test_load_runs_nothing",
     "octlm.py",
     'map_location="cpu", weights_only=True', 'map_location="cpu", weights_only=False'),
]


def passes(folder: Path, test: str) -> bool:
    """Whether that test, or all of them for "", passes in that copy.

    The tests of this script are left out: in a broken copy it misses the text that it replaces.
    """
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "test_octlm.py",
         "-k", f"{test} and not break_it" if test else "not break_it",
         f"--basetemp={folder.parent / 'pytest'}"],  # removed with the copy
        cwd=folder, capture_output=True, text=True,
    )
    if result.returncode > 1:  # no test ran: the copy does not import, or has no such test
        raise RuntimeError(result.stdout + result.stderr)
    return result.returncode == 0


def main() -> int:
    for what, _, name, old, _ in BREAKS:
        if (ROOT / name).read_text(encoding="utf-8").count(old) != 1:
            print(f"{name} no longer holds what '{what}' replaces", file=sys.stderr)
            return 1
    for name in ("SIGTERM", "SIGHUP"):  # otherwise they would end Python with no clean-up
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: sys.exit("break_it.py: killed"))
    print("| broken on purpose | test that guards it | notices |\n|:--|:--|:--|", flush=True)
    print("the whole suite in an unbroken copy: about a minute on two idle cores",
          file=sys.stderr, flush=True)
    as_expected = True
    for number, (what, test, name, old, new) in enumerate(
            [("nothing", "", "octlm.py", "", ""), *BREAKS]):
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
            noticed = not passes(folder, test)
        as_expected &= noticed == bool(old)
        print(f"| {what} | {test or 'all tests'} | {'yes' if noticed else 'no'} |", flush=True)
    return 0 if as_expected else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("break_it.py: interrupted")
