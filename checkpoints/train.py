"""Train the default octlm model, and its tokenizer if there is none, on plain text files.

    python checkpoints/train.py FILE [FILE ...] --tokens N --out OUT [--heldout FILE] [--resume]

Documents are separated by a line `<|endoftext|>`; a file named twice counts twice. Text cut out of
longer documents goes to --heads, --middles or --tails, so that the model does not learn that a text
begins or ends where it was cut.

The learning rate is held, then falls to zero over the last fifth, on whole documents alone. Every
random choice follows from the seed and the step alone, so a resumed run equals an unbroken one bit
for bit; until the rate falls, it may be resumed with another --tokens. Beside the checkpoint OUT
lie OUT.state (removed at the end) and OUT.jsonl, one row per evaluation.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import io
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import day5
from octlm import Decoder, DecoderConfig, load_checkpoint, save_atomically, save_checkpoint

SEPARATOR = "<|endoftext|>"
WARMUP_STEPS = 100
SAVE_SECONDS = 180


def read_documents(path: Path) -> list[str]:
    """The documents of one file, without the newlines at their ends; blank ones are dropped.

    Raises ValueError for a file that is not UTF-8 or holds no text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    # A file may begin with a byte order mark, and joined files have some in their midst.
    parts = re.split(rf"(?m)^\ufeff?{re.escape(SEPARATOR)}[ \t]*$", text)
    documents = [document for part in parts if (document := part.strip("\n\ufeff")).strip()]
    if not documents:
        raise ValueError(f"{path} holds no text")
    return documents


def check_folder(path: Path) -> None:
    """Raises OSError if the file can't be written because of its folder."""
    try:
        tempfile.TemporaryFile(dir=path.absolute().parent).close()
    except OSError as error:
        raise OSError(f"cannot write in the folder of {path}: {error.strerror}") from error


def train_tokenizer(documents: Iterable[str], target: Path, vocab_size: int) -> None:
    """Train a lossless sentencepiece BPE model on the documents and write it to `target`.

    Raises ValueError for documents that do not give so many pieces.
    """
    check_folder(target)
    trained = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in documents for line in text.split("\n") if line),
            model_writer=trained,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            user_defined_symbols=["\n"],
            max_sentence_length=2**30,  # longer lines would be dropped
            num_threads=2,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(f"no tokenizer of {vocab_size} pieces from this text: {error}") from error
    target.write_bytes(trained.getvalue())


def load_tokenizer(path: Path) -> sentencepiece.SentencePieceProcessor:
    """As `day5.load_tokenizer`, and raises ValueError for one without EOS or byte fallback, too."""
    tokenizer = day5.load_tokenizer(path)
    if tokenizer.eos_id() < 0:
        raise ValueError(f"tokenizer {path} has no end-of-text token (EOS)")
    # Else a character that it lacks would become <unk>, the mark of a cut.
    if not any(map(tokenizer.is_byte, range(tokenizer.vocab_size()))):
        raise ValueError(f"tokenizer {path} has no byte fallback")
    return tokenizer


def encode(
    tokenizer: sentencepiece.SentencePieceProcessor, documents: list[str], kind: str = "whole"
) -> list[Tensor]:
    """BOS + tokens + EOS of each document, as int32.

    Where a kind of piece ("heads", "middles", "tails") was cut, <unk> stands instead of BOS or EOS.
    """
    cut = tokenizer.unk_id()
    first = cut if kind in ("middles", "tails") else tokenizer.bos_id()
    last = cut if kind in ("heads", "middles") else tokenizer.eos_id()
    encoded = tokenizer.encode(documents, num_threads=2)
    return [torch.tensor([first, *ids, last], dtype=torch.int32) for ids in encoded]


def targets_of(ids: Tensor, cut: int) -> Tensor:
    """The targets of ids [batch, T + 1]: [batch, T], with -100 for those that do not count.

    The mark of a cut does not count, nor does the token after it, which may be half a word.
    """
    inputs, targets = ids[:, :-1], ids[:, 1:]
    return targets.masked_fill((inputs == cut) | (targets == cut), -100)


class Batches:
    """Training batches [batch, context + 1], each a function of the seed and the step alone.

    Each epoch joins the documents in a new order, cuts the stream into context-long sequences, and
    deals those out in a new order.
    """

    def __init__(self, documents: list[Tensor], batch: int, context: int, seed: int) -> None:
        self.documents, self.batch, self.context, self.seed = documents, batch, context, seed
        count = (sum(map(len, documents)) - 1) // context
        self.steps_per_epoch = count // batch
        if self.steps_per_epoch == 0:
            raise ValueError(f"{count} sequences of {context} tokens in the text, expected {batch}")
        self.epoch = -1

    def __getitem__(self, step: int) -> Tensor:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.documents), generator=generator)
            self.stream = torch.cat([self.documents[i] for i in order])
            count = (len(self.stream) - 1) // self.context
            self.starts = torch.randperm(count, generator=generator) * self.context
            self.epoch = epoch
        starts = self.starts[place * self.batch : (place + 1) * self.batch]
        return self.stream[starts[:, None] + torch.arange(self.context + 1)].long()


@torch.inference_mode()
def bits_per_byte(
    model: Decoder, tokenizer: sentencepiece.SentencePieceProcessor, documents: list[str]
) -> float:
    """Bits per byte of text, in the model's dtype: each document alone, BOS + tokens + EOS.

    A document counts with at most context_length targets and the bytes those cover; EOS adds bits
    but no bytes.
    """
    context, device = model.config.context_length, model.token_embedding.weight.device
    sizes = [
        1 if tokenizer.is_byte(i) else len(tokenizer.id_to_piece(i).replace("\u2581", " ").encode())
        for i in range(tokenizer.vocab_size())
    ]
    nats, size = 0.0, 0
    encoded = sorted((ids[: context + 1] for ids in encode(tokenizer, documents)), key=len)
    for first in range(0, len(encoded), 8):
        group = encoded[first : first + 8]
        padded = torch.nn.utils.rnn.pad_sequence(group, batch_first=True, padding_value=-100).long()
        targets = padded[:, 1:].to(device)
        logits = model(padded[:, :-1].clamp(min=0).to(device)).float()
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        for ids in group:
            size += sum(sizes[i] for i in ids[1:].tolist() if i != tokenizer.eos_id())
    return nats / math.log(2) / size


def choose_dtype() -> tuple[str, str]:
    """The dtype to train in, "bfloat16" or "float32", and why."""
    if torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:  # others compute in bfloat16, too, but many times slower than in float32
        known = torch.cpu.get_capabilities()
        fast = known.get("amx_bf16", False) or known.get("avx512_bf16", False)
    return ("bfloat16", "the processor has it") if fast else ("float32", "no fast bfloat16 here")


def check_out(out: Path, resume: bool) -> None:
    """Raises OSError where the files of a run can't begin or go on."""
    check_folder(out)
    if resume and not Path(f"{out}.state").exists():
        raise FileNotFoundError(f"{out}.state does not exist: there is nothing to resume")
    existing = [name for end in ("", ".state", ".jsonl") if os.path.lexists(name := f"{out}{end}")]
    if existing and not resume:
        raise FileExistsError(f"{existing[0]} exists: resume, or move it away first")


def load_state(path: Path, device: torch.device) -> dict:
    """Raises ValueError for a file that is not a state."""
    with open(path, "rb") as file:
        try:
            if damaged := zipfile.ZipFile(file).testzip():  # torch.load verifies no checksum
                raise ValueError(damaged)
            file.seek(0)
            state = torch.load(file, map_location=device, weights_only=True)
            state["settings"], state["optimizers"]
        except Exception as error:  # what garbled bytes raise is not documented
            raise ValueError(f"{path} is damaged, or no state") from error
    return state


def train(
    config: DecoderConfig,
    documents: list[Tensor],
    out: Path,
    *,
    tokens: int,
    batch: int,
    learning_rate: float,
    seed: int,
    weight_decay: float = 0.2,
    pieces: Sequence[Tensor] = (),
    cut: int = 0,
    initial: Decoder | None = None,
    dtype: str = "bfloat16",
    resume: bool = False,
    keep_every: int = 0,
    evaluate_every: int = 1_000_000,
    evaluate=None,
    facts: dict | None = None,
) -> None:
    """Train on `tokens` tokens and write the checkpoint to `out`, in float16.

    The last fifth is on `documents` alone, the rest on `pieces` too; `cut` marks where those were
    cut. `initial` gives the weights to start from. In "bfloat16", autocast computes the model and
    Muon trains the matrices in its blocks; in "float32" there is no autocast, and AdamW trains
    all, since Muon works in bfloat16. Each `keep_every` tokens the weights of the moment are
    written to OUT-<tokens>. `evaluate(model)` gives bits per byte.

    Raises FileExistsError rather than overwrite a checkpoint or a state, ValueError for a damaged
    state or one made with other settings, and RuntimeError for a loss that is not finite.
    """
    check_out(out, resume)
    state_path, rows_path = Path(f"{out}.state"), Path(f"{out}.jsonl")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole = Batches(documents, batch, config.context_length, seed)
    mixed = Batches([*documents, *pieces], batch, config.context_length, seed)
    per_step = batch * config.context_length
    steps = math.ceil(tokens / per_step)
    warmup = min(WARMUP_STEPS, max(1, steps // 10))
    held = steps - steps // 5

    def crosses(every: int, step: int) -> bool:
        """Whether that many steps, and not one less, reach a multiple of `every` tokens."""
        return every > 0 and step * per_step // every > (step - 1) * per_step // every

    kept = {
        step: out.with_stem(f"{out.stem}-{step * per_step}") for step in range(1, steps + 1)
        if crosses(keep_every, step)
    }
    if existing := [path for path in kept.values() if os.path.lexists(path) and not resume]:
        raise FileExistsError(f"{existing[0]} exists: move it away first")
    digest = hashlib.sha256(torch.cat([*documents, *pieces]).numpy()).hexdigest()
    settings = {
        "config": asdict(config), "batch": batch, "learning_rate": learning_rate,
        "weight_decay": weight_decay, "dtype": dtype, "seed": seed, "text": digest,
        "evaluate_every": evaluate_every,
    }

    torch.manual_seed(seed)
    model = Decoder(config).to(device)
    if initial is not None:
        model.load_state_dict(initial.state_dict())
    matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    inside = {id(weight) for weight in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in inside]
    common = {"lr": learning_rate, "weight_decay": weight_decay}
    if dtype == "bfloat16":
        inner = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **common)
    else:
        inner = torch.optim.AdamW(matrices, betas=(0.9, 0.95), **common)
    outer = torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = [inner, outer]
    done, seconds, loss = 0, 0.0, math.nan
    if resume:
        state = load_state(state_path, device)
        other = [name for name in settings if state["settings"].get(name) != settings[name]]
        if other:
            raise ValueError(f"{state_path} was made with another {' and '.join(other)}")
        if state["steps"] != steps and state["step"] > min(held, state["held"]):
            raise ValueError(f"{state_path}: too late for other tokens, the rate falls")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        done, seconds, loss = state["step"], state["seconds"], state["loss"]
        if rows_path.exists():  # rows written after that state come again
            try:
                rows = [row for row in rows_path.read_bytes().splitlines(keepends=True)
                        if row.endswith(b"\n") and json.loads(row)["step"] <= min(done, steps - 1)]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{rows_path} is damaged, or holds other rows") from error
            os.truncate(rows_path, sum(map(len, rows)))  # a full disk can't lose the others

    def save_state() -> None:
        file = io.BytesIO()
        torch.save({
            "settings": settings, "steps": steps, "held": held, "step": done,
            "seconds": seconds, "loss": loss, "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }, file)
        save_atomically(state_path, file.getbuffer())

    def write_row() -> float | None:
        model.eval()
        torch.manual_seed(seed)  # a score that samples depends on the model alone
        score = evaluate(model) if evaluate else None
        model.train()
        row = {"type": "evaluation", "step": done, "tokens": done * per_step,
               "seconds": round(seconds, 1), "train_loss": loss, "bits_per_byte": score,
               "time": datetime.now(UTC).isoformat(timespec="seconds")}
        with open(rows_path, "a", encoding="utf-8") as rows:
            rows.write(json.dumps(row, sort_keys=True) + "\n")
        return score

    def save_weights(path: Path, **score: float | None) -> None:
        save_checkpoint(
            path, copy.deepcopy(model).half(), **(facts or {}), tokens=done * per_step, batch=batch,
            seed=seed, learning_rate=learning_rate, weight_decay=weight_decay, dtype=dtype,
            seconds=round(seconds), torch=torch.__version__, **score,
        )

    model.train()
    last_save = shown = time.monotonic()
    for step in range(done, steps):
        started = time.monotonic()
        torch.manual_seed(seed * 1_000_003 + step)  # dropout, too, depends on the step alone
        factor = min((step + 1) / warmup, 1, (steps - step) / (steps - held + 1))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * factor
        ids = whole[step - held] if pieces and step >= held else mixed[step]
        ids = ids.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(ids[:, :-1])
        objective = F.cross_entropy(logits.float().flatten(0, 1), targets_of(ids, cut).flatten())
        objective.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        done, loss = step + 1, objective.item()
        if not math.isfinite(loss + norm):  # before it is in the weights, and in the state
            raise RuntimeError(f"the loss is {loss} at step {done}, its gradient's norm {norm}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        now = time.monotonic()
        seconds += now - started
        if now - shown >= 10 or done == steps:
            rate, shown = done * per_step / seconds, now
            day5.say(f"step {done}/{steps}  loss {loss:.3f}  {rate:,.0f} tokens/s  "
                     f"{(steps - done) * per_step / rate / 60:.0f} min left")
        if done in kept:
            save_weights(kept[done])
        crossed = crosses(evaluate_every, done)
        if crossed and done < steps:
            write_row()
        if crossed or now - last_save >= SAVE_SECONDS:
            save_state()
            last_save = time.monotonic()

    model.half().float()  # what is shipped is what is scored
    score = write_row()
    save_weights(out, bits_per_byte=score)
    state_path.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train the default octlm model on text files.")
    parser.add_argument("files", nargs="+", type=Path, help="text; named twice, it counts twice")
    for kind, lack in (("heads", "end"), ("middles", "beginning and end"), ("tails", "beginning")):
        parser.add_argument(f"--{kind}", action="append", default=[], type=Path, metavar="FILE",
                            help=f"text cut out of longer documents, without their {lack}")
    parser.add_argument("--init", type=Path, help="checkpoint to start from; else random weights")
    parser.add_argument("--tokens", type=int, required=True, help="how many tokens to train on")
    parser.add_argument("--heldout", type=Path, help="text to score in bits per byte")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint to write")
    parser.add_argument("--tokenizer", type=Path, default=HERE / "tokenizer.model")
    parser.add_argument("--vocab-size", type=int, help="of a new tokenizer; default 8192")
    parser.add_argument("--sizes", type=json.loads, default={}, metavar="JSON",
                        help='other sizes of the model, such as {"n_layers": 4}')
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"),
                        help="else bfloat16 where the processor computes fast in it")
    parser.add_argument("--weight-decay", type=float, default=0.2, help="of matrices in blocks")
    parser.add_argument("--keep-every", type=int, default=0, metavar="TOKENS",
                        help="also keep the weights of every so many tokens, as OUT-<tokens>")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from OUT.state")
    args = parser.parse_args(argv)
    given = [n for n in (args.tokens, args.batch, args.vocab_size) if n is not None]
    if min(given) < 1 or not 0 < args.learning_rate < math.inf:
        parser.error("--tokens, --batch, --vocab-size and --learning-rate must be positive")
    if min(args.keep_every, args.seed) < 0 or not 0 <= args.weight_decay < math.inf:
        parser.error("--keep-every, --seed and --weight-decay must be 0 or positive")
    try:
        DecoderConfig(1, **args.sizes)
    except (TypeError, ValueError) as error:
        parser.error(f"--sizes: {error}")
    if args.init and args.sizes:
        parser.error("--init brings its own sizes")
    try:
        check_out(args.out, args.resume)
        kinds = (("whole", args.files), ("heads", args.heads), ("middles", args.middles),
                 ("tails", args.tails))
        counts = Counter((path, kind) for kind, paths in kinds for path in paths)
        texts = {path: read_documents(path) for path, _ in counts}
        heldout = read_documents(args.heldout) if args.heldout else None
        initial = load_checkpoint(args.init) if args.init else None
        if not (args.tokenizer.exists() or args.init):
            train_tokenizer(itertools.chain(*texts.values()), args.tokenizer,
                            args.vocab_size or 8192)
        tokenizer = load_tokenizer(args.tokenizer)
        size = tokenizer.vocab_size()
        config = initial.config if initial else DecoderConfig(size, **args.sizes)
        if config.vocab_size != size:
            raise ValueError(f"{args.init} has {config.vocab_size} tokens, the tokenizer {size}")
        if args.vocab_size not in (None, size):
            raise ValueError(f"{args.tokenizer} has {size} tokens, not {args.vocab_size}")
        dtype, why = (args.dtype, "as asked for") if args.dtype else choose_dtype()
        day5.say(f"training in {dtype}: {why}")
        documents, pieces = [], []
        for (path, kind), count in counts.items():
            encoded = encode(tokenizer, texts[path], kind)
            (documents if kind == "whole" else pieces).extend(encoded * count)
            size = sum(map(len, encoded))
            day5.say(f"{path.name}: {kind}, {len(encoded):,} documents, {size:,} tokens, x {count}")
        train(
            config, documents, args.out,
            tokens=args.tokens, batch=args.batch, learning_rate=args.learning_rate, seed=args.seed,
            weight_decay=args.weight_decay, pieces=pieces, cut=tokenizer.unk_id(), initial=initial,
            dtype=dtype, resume=args.resume, keep_every=args.keep_every,
            evaluate=(lambda model: bits_per_byte(model, tokenizer, heldout)) if heldout else None,
            facts={"files": Counter(path.name for _, paths in kinds for path in paths),
                   "init": args.init and args.init.name},
        )
    except (OSError, ValueError, RuntimeError) as error:
        day5.say(f"train.py: {error}")
        return 1
    except KeyboardInterrupt:
        saved = Path(f"{args.out}.state").exists()
        then = "--resume goes on from the last saved state" if saved else "no state was saved yet"
        day5.say(f"train.py: interrupted; {then}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
