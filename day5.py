"""Day 5: what the key-value cache buys on a trained 26M model.

    python day5.py cache --lengths 64 256 512 --out t4.jsonl
    python day5.py generate --prompt "Once upon a time"

`cache` times naive and cached greedy generation in turn, asserts that their tokens are equal and
that the cache holds exactly the bytes of the formula, and writes one JSON row per length.
`generate` streams text. Exit status: 0 if all holds, 1 if something failed, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import io
import itertools
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import sentencepiece
import torch
from torch import Tensor

from octlm import Decoder, kv_cache_bytes, load_checkpoint

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def say(line: str) -> None:
    """Print one line to stderr. A stderr that is closed or full must not end a measurement."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def load_tokenizer(path: Path) -> sentencepiece.SentencePieceProcessor:
    """Read a sentencepiece model that has a BOS token.

    Raises FileNotFoundError or ValueError, naming the file, if there is none in it.
    """
    if path.exists() and not path.is_file():  # a missing one is named by read_bytes
        raise ValueError(f"tokenizer {path} is not a file")
    try:
        tokenizer = sentencepiece.SentencePieceProcessor()
        tokenizer.LoadFromSerializedProto(path.read_bytes())
    except RuntimeError:
        raise ValueError(f"{path} is not a sentencepiece model") from None
    if tokenizer.bos_id() < 0:
        raise ValueError(f"tokenizer {path} has no beginning-of-text token (BOS)")
    return tokenizer


def load(args: argparse.Namespace) -> tuple[Decoder, sentencepiece.SentencePieceProcessor]:
    """The model on its device and in its dtype, and the tokenizer. Resolves "auto" in `args`."""
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(args.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device {args.device} is not there: PyTorch sees {count} CUDA devices")
    if args.dtype == "auto":
        args.dtype = "float16" if device.type == "cuda" else "float32"
    tokenizer = load_tokenizer(args.tokenizer)
    model = load_checkpoint(args.checkpoint).to(device, DTYPES[args.dtype])
    if tokenizer.vocab_size() != model.config.vocab_size:
        raise ValueError(
            f"{args.tokenizer} has {tokenizer.vocab_size()} tokens, "
            f"{args.checkpoint} has {model.config.vocab_size}: they do not belong together"
        )
    return model, tokenizer


def timed_generation(
    model: Decoder, prompt: Tensor, length: int, cached: bool
) -> tuple[Tensor, float]:
    """Greedy tokens [1, prompt + length] and the seconds until the device had made them all."""
    generate = model.generate_cached if cached else model.generate
    synchronize = torch.get_device_module(prompt.device).synchronize  # a no-op on the CPU
    synchronize(prompt.device)
    start = time.perf_counter()
    tokens = generate(prompt, length)
    synchronize(prompt.device)
    return tokens, time.perf_counter() - start


def explain_difference(model: Decoder, expected: Tensor, actual: Tensor) -> dict:
    """Where two rows of tokens [1, n] first differ, and how close the choice was there."""
    position = int((expected != actual).nonzero()[0, 1])
    prefix = expected[:, :position]
    with torch.inference_mode():
        naive = model(prefix).float()
    steps, cache = [], None
    for column in range(position):
        logits, cache = model.forward_cached(prefix[:, column : column + 1], cache)
        steps.append(logits.float())
    first, second = naive[0, -1].topk(2).values.tolist()
    return {
        "first_difference": position,
        "tokens": [int(expected[0, position]), int(actual[0, position])],
        "gap": first - second,
        "max_logit_difference": float((torch.cat(steps, dim=1) - naive).abs().max()),
    }


def measure(
    model: Decoder, prompt: Tensor, length: int, repeats: int, report: Callable[[int, int], None]
) -> dict:
    """Time both paths in turn and count the cache's bytes, for one length.

    Returns the fields of its row. Calls report(length, repeat) before each repeat. Raises
    RuntimeError if the cache does not hold as many bytes as the formula says.
    """
    outputs, seconds = [], {False: [], True: []}
    for repeat in range(repeats):
        report(length, repeat)
        for cached in (False, True):
            tokens, elapsed = timed_generation(model, prompt, length, cached)
            outputs.append(tokens)
            seconds[cached].append(elapsed)
    _, cache = model.forward_cached(outputs[0][:, :-1])
    held = sum(tensor.numel() * tensor.element_size() for entry in cache for tensor in entry)
    formula = kv_cache_bytes(model.config, length, cache[0][0].element_size())
    if held != formula:
        raise RuntimeError(
            f"actual cache bytes differ from the model formula: {held}, expected {formula}"
        )
    naive, cached = statistics.median(seconds[False]), statistics.median(seconds[True])
    row = {
        "length": length,
        "naive_seconds": seconds[False],
        "cached_seconds": seconds[True],
        "naive_tokens_per_second": length / naive,
        "cached_tokens_per_second": length / cached,
        "speedup": naive / cached,
        "cache_bytes": held,
        "greedy_equal": all(torch.equal(outputs[0], other) for other in outputs),
    }
    if not row["greedy_equal"]:
        other = next(other for other in outputs if not torch.equal(outputs[0], other))
        row |= explain_difference(model, outputs[0], other)
    return row


def append_line(path: Path, line: str, first: bool = False) -> None:
    """Write a line to the disk, all of it, or leave the file as it was. The first creates the file.

    Raises FileExistsError if the first line finds a file, OSError if a line cannot be written.
    """
    data = line.encode()
    before = 0 if first else path.stat().st_size
    file = open(path, "xb" if first else "ab", buffering=0)
    try:
        with file:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    except BaseException as error:  # the file is closed by now: Windows removes no open file
        path.unlink() if first else os.truncate(path, before)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def hardware_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def markdown_table(rows: list[dict], fields: Sequence[str] = ()) -> str:
    """Rows of the cache stage as a Markdown table, led by a column for each of `fields`.

    GB/s is the size of the weights times the cached tokens per second, because each token reads
    every weight once. A row whose tokens differ shows no speed.
    """

    def rate(row: dict, path: str) -> str:
        rates = [row["length"] / seconds for seconds in row[f"{path}_seconds"]]
        median = row[f"{path}_tokens_per_second"]
        spread = "[{:.{d}f}-{:.{d}f}]".format(min(rates), max(rates), d=int(median < 9.95))
        return f"{median:.{int(median < 99.95)}f} {spread}"

    names = ["length", "naive tok/s", "cached tok/s", "GB/s", "speedup", "bytes", "equal"]
    cells = [[*fields, *names]]
    for row in rows:
        speeds, equal = ["-"] * 4, "no"
        if row["greedy_equal"]:
            read = row["weight_bytes"] * row["cached_tokens_per_second"] / 1e9
            speeds = [rate(row, "naive"), rate(row, "cached"), f"{read:.1f}",
                      f"{row['speedup']:.2f}x"]
            equal = "yes"
        cells.append([*(str(row[field]) for field in fields), str(row["length"]), *speeds,
                      f"{row['cache_bytes']:,}", equal])
    widths = [max(map(len, column)) for column in zip(*cells)]
    spare = 79 - sum(width + 1 for width in widths)
    pad = "" if 0 <= spare < 2 * len(widths) else " "  # none if only that fits 80 columns
    cells.insert(1, ["-" * (width - 1) + ":" for width in widths])
    lines = [f"{pad}|{pad}".join(map(str.rjust, line, widths)) for line in cells]
    return "\n".join(f"|{pad}{line}{pad}|" for line in lines)


def cache_stage(args: argparse.Namespace) -> None:
    """Measure every length and print the table. Raises at the first length that fails.

    If its tokens differ, its row is written before that.
    """
    try:  # what cannot be written should show now, not after minutes of measuring
        append_line(args.out, "\n", first=True)  # a folder and a dangling link exist, too
    except FileExistsError:
        raise FileExistsError(f"{args.out} already contains a measurement") from None
    args.out.unlink()
    model, tokenizer = load(args)
    config, device = model.config, model.token_embedding.weight.device
    full = config.attention == "sdpa" and not config.attention_window
    if not full or max(args.lengths) > config.context_length:
        raise ValueError(
            "cache benchmark requires SDPA and lengths within context, got "
            f"attention={config.attention!r}, attention_window={config.attention_window}, "
            f"lengths up to {max(args.lengths)} in a context of {config.context_length}"
        )
    about = {
        "type": "cache_benchmark",
        "checkpoint_sha256": hashlib.sha256(args.checkpoint.read_bytes()).hexdigest(),
        "device": str(device),
        "dtype": str(model.token_embedding.weight.dtype),
        "hardware": hardware_name(device),
        "python": platform.python_version(),
        "pytorch": torch.__version__,
        "threads": torch.get_num_threads(),
        "weight_bytes": sum(w.numel() * w.element_size() for w in model.parameters()),
    }
    prompt = torch.tensor([[tokenizer.bos_id()]], device=device)
    for cached in (False, True):
        timed_generation(model, prompt, min(8, *args.lengths), cached)

    started = time.perf_counter()
    work = [n * (n + 128) for n in args.lengths for _ in range(args.repeats)]  # as time grows

    def report(length: int, repeat: int) -> None:
        done = len(rows) * args.repeats + repeat
        spent = time.perf_counter() - started
        left = f", about {spent / sum(work[:done]) * sum(work[done:]):.0f} s left" if done else ""
        say(f"length {length}, repeat {repeat + 1} of {args.repeats}{left}")

    rows = []
    for length in args.lengths:
        row = about | measure(model, prompt, length, args.repeats, report)
        row["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps(row, sort_keys=True, allow_nan=False) + "\n"
        append_line(args.out, line, first=not rows)
        rows.append(row)
        if not row["greedy_equal"]:
            raise RuntimeError(f"cached generation changed greedy output at length {length}")
    print(markdown_table(rows))
    print(f"\n{about['hardware']}, {about['device']}, {args.dtype}, {about['threads']} threads,")
    print(f"PyTorch {about['pytorch']}, Python {about['python']}; median of {args.repeats} "
          "with [min-max]")


def text_pieces(
    tokenizer: sentencepiece.SentencePieceProcessor, prompt: list[int], new: Iterable[int]
) -> Iterator[str]:
    """Yield the prompt's text, then the text of the new tokens as they come.

    Joined, the pieces are `decode` of all tokens at once. While the last bytes of a character are
    missing, the decoded text ends in replacement characters: these are held back.
    """
    ids, shown = [], ""
    for more in itertools.chain([prompt], ([token] for token in new)):
        ids += more
        text = tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")
        yield text[len(shown) :]
        shown = text
    yield tokenizer.decode(ids)[len(shown) :]


def generate_stage(args: argparse.Namespace) -> None:
    """Stream the prompt's continuation to stdout, then times and cache bytes to stderr.

    The pass over the prompt also gives the first new token. The speed is that of the later ones.
    """
    prompt = args.prompt.encode(errors="surrogateescape")  # as the shell gave it
    if prompt == b"-":
        if sys.stdin is None:
            raise ValueError("standard input is closed")
        prompt = sys.stdin.buffer.read().removesuffix(b"\n")
    try:
        prompt = prompt.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt is not UTF-8: {error}") from None
    model, tokenizer = load(args)
    device = model.token_embedding.weight.device
    ids = [tokenizer.bos_id(), *tokenizer.encode(prompt)]
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal cannot show becomes "?"
        sys.stdout.reconfigure(errors="replace")
    generator = torch.Generator(device).manual_seed(args.seed)
    tokens = model.stream(
        torch.tensor([ids], device=device), args.tokens, cached=not args.no_cache,
        temperature=args.temperature, top_k=args.top_k or None, generator=generator,
    )
    arrivals = []

    def until_end_of_text() -> Iterator[int]:
        for token in map(Tensor.item, tokens):
            arrivals.append(time.perf_counter())
            if token == tokenizer.eos_id():
                return
            yield token

    start = time.perf_counter()
    for piece in text_pieces(tokenizer, ids, until_end_of_text()):
        print(piece, end="", flush=True)
    print(flush=True)
    made, seconds = len(arrivals), arrivals[-1] - arrivals[0]
    speed = f", {(made - 1) / seconds:.1f} tokens/s" if made > 1 else ""
    positions = min(len(ids) + made - 1, model.config.context_length)
    element_size = model.token_embedding.weight.element_size()
    held = 0 if args.no_cache else kv_cache_bytes(model.config, positions, element_size)
    say(f"prompt: {len(ids)} tokens in {arrivals[0] - start:.2f} s; "
        f"text: {made} tokens{speed}; {held:,} cache bytes")


def integer(least: int, most: int) -> Callable[[str], int]:
    """An argparse type: an integer from `least` to `most`."""

    def parse(text: str) -> int:
        if not (re.fullmatch("[0-9]{1,19}", text) and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(
                f"must be an integer from {least} to {most}, got {text!r}")
        return int(text)

    return parse


positive = integer(1, 10**9)


def temperature(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be finite and at least 0, got {text}")
    return value


def device_name(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,2})?", text):
        raise argparse.ArgumentTypeError(f"must be auto, cpu, cuda or cuda:N, got {text!r}")
    return text


def main(argv: list[str] | None = None) -> int:
    """Run one stage and return the exit status. Wrong arguments end in argparse's SystemExit(2)."""
    shown = "(default: %(default)s)"
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--checkpoint", type=Path, default=CHECKPOINTS / "octlm-26m.pt", help=shown)
    common.add_argument("--tokenizer", type=Path, default=CHECKPOINTS / "tokenizer.model",
                        help=shown)
    common.add_argument("--device", type=device_name, default="auto",
                        help=f"auto (CUDA if there is one), cpu, cuda or cuda:N {shown}")
    common.add_argument("--dtype", choices=("auto", *DTYPES), default="auto",
                        help=f"auto: float16 on CUDA, float32 on CPU {shown}")
    common.add_argument("--threads", type=integer(1, 1024),
                        help="CPU threads (default: PyTorch's choice)")
    parser = argparse.ArgumentParser(
        prog="day5.py", description="What the key-value cache buys on a trained 26M model.")
    stages = parser.add_subparsers(dest="stage", required=True)

    cache = stages.add_parser("cache", parents=[common], help="measure naive against cached")
    cache.add_argument("--lengths", type=positive, nargs="+", default=[64, 256, 512],
                       help="numbers of new tokens (default: 64 256 512)")
    cache.add_argument("--out", type=Path, required=True, help="new file for the JSONL rows")
    cache.add_argument("--repeats", type=positive, default=3, help=f"timed runs of each {shown}")

    generate = stages.add_parser("generate", parents=[common], help="stream text")
    generate.add_argument("--prompt", default="Once upon a time",
                          help=f"- reads standard input, without its last newline {shown}")
    generate.add_argument("--tokens", type=positive, default=200, help=f"at most so many {shown}")
    generate.add_argument("--temperature", type=temperature, default=0.8,
                          help=f"0 is greedy {shown}")
    generate.add_argument("--top-k", type=integer(0, 10**9), default=40,
                          help=f"draw from the k likeliest tokens; 0: from all {shown}")
    generate.add_argument("--seed", type=integer(0, 2**63 - 1), default=0, help=shown)
    generate.add_argument("--no-cache", action="store_true", help="the naive path; the same text")

    args = parser.parse_args(argv)
    try:
        (cache_stage if args.stage == "cache" else generate_stage)(args)
        print(end="", flush=True)  # a full disk or closed pipe shows here, not at exit
    except KeyboardInterrupt:
        kept = "; rows already written are kept" if args.stage == "cache" else ""
        say(f"day5.py: interrupted{kept}")
        return 1
    except BrokenPipeError:  # as in `| head -1`; at exit Python flushes again, and would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say("day5.py: standard output was closed")
        return 1
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        fault = str(error).partition("\n")[0] or type(error).__name__
        say(f"day5.py: {fault}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
