"""Write a checkpoint and its tokenizer as a Hugging Face Llama folder, for serving engines.

    pip install safetensors==0.8.0
    python scripts/export.py FOLDER [--checkpoint FILE] [--tokenizer FILE]

transformers and vLLM read the folder as it is; llama.cpp's converter makes GGUF from it
(docs/export.md). RoPE turns adjacent channels (2i, 2i + 1) in octlm and channels
(i, i + head_size / 2) in those engines, so the rows of the query and key weights are reordered.
FOLDER must not exist; a failure leaves none. Exit status: 0, 1 for what a Llama cannot compute
alike or the conversion does not cover, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import sentencepiece
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from day5 import CHECKPOINTS, load_tokenizer, say
from octlm import Decoder, DecoderConfig, load_checkpoint

# Numbers of sentencepiece's file format (sentencepiece_model.proto).
BPE = 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what sentencepiece writes for a space


def message_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protocol buffer, undecoded (https://protobuf.dev)."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        number, wire_type = divmod(varint(), 8)
        if wire_type == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(wire_type) or varint()
        yield number, message[position : position + size]
        position += size


def read_pieces(tokenizer: sentencepiece.SentencePieceProcessor) -> list[tuple[str, float, int]]:
    """Text, score and type of every piece, in the order of the ids.

    Raises ValueError for a tokenizer that the conversion does not cover.
    """
    pieces, settings = [], {}
    for number, value in message_fields(tokenizer.serialized_model_proto()):
        if number == 1:
            piece = dict(message_fields(value))
            score = struct.unpack("<f", piece.get(2, bytes(4)))[0]
            pieces.append((piece[1].decode(), score, piece.get(3, NORMAL)))
        elif number in (2, 3, 5):  # how it was trained, normalizes, denormalizes
            settings[number] = dict(message_fields(value))
    trainer, normalizer, denormalizer = (settings.get(number, {}) for number in (2, 3, 5))
    for holds, needed in (
        (trainer.get(3) == BPE, "a BPE model"),
        (trainer.get(35), "byte fallback"),
        (not trainer.get(24), "spaces before words, not after"),
        (not normalizer.get(2) and not denormalizer.get(2), "normalization 'identity'"),
        (normalizer.get(3) == 0, "no dummy prefix"),
        (normalizer.get(4) == 0, "whitespace kept (remove_extra_whitespaces off)"),
        (normalizer.get(5, 1), "spaces escaped"),
        (tokenizer.bos_id() >= 0 and tokenizer.eos_id() >= 0, "a BOS and an EOS token"),
        (all(text == "\n" for text, _, kind in pieces if kind == USER_DEFINED),
         "no user-defined pieces but the newline"),
        (all(kind != UNUSED for _, _, kind in pieces), "no unused pieces"),
    ):
        if not holds:
            raise ValueError(f"this tokenizer cannot be converted: it needs {needed}")
    return pieces


def tokenizer_json(tokenizer: sentencepiece.SentencePieceProcessor) -> dict:
    """The same BPE as a `tokenizers` model: what encodes a text is the order of its merges.

    sentencepiece joins the two neighbours whose joint piece has the highest score, so every way
    to split a piece in two is a merge with the rank of that piece.
    """
    pieces = read_pieces(tokenizer)
    scores = {text: score for text, score, kind in pieces if kind == NORMAL}
    merges = [[text[:cut], text[cut:]]
              for text in sorted(scores, key=scores.get, reverse=True)
              for cut in range(1, len(text))
              if text[:cut] in scores and text[cut:] in scores]
    bos = tokenizer.id_to_piece(tokenizer.bos_id())
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": token, "content": text, "special": True, "normalized": False,
             "single_word": False, "lstrip": False, "rstrip": False}
            for token, (text, _, kind) in enumerate(pieces) if kind in (UNKNOWN, CONTROL)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": bos, "type_id": 0}},
                     {"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id()], "tokens": [bos]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE", "byte_fallback": True, "fuse_unk": False, "ignore_merges": False,
            "unk_token": tokenizer.id_to_piece(tokenizer.unk_id()),
            "vocab": {text: token for token, (text, _, _) in enumerate(pieces)},
            "merges": merges},
    }


def llama_config(config: DecoderConfig) -> dict:
    """What config.json says of the model. Raises ValueError for what a Llama has no equal of."""
    for holds, name in ((config.position == "learned", "learned positions"),
                        (config.kv_compress_block, "compressed keys and values"),
                        (config.attention_window, "an attention window")):
        if holds:
            raise ValueError(f"the model has {name}, which a Llama has not")
    scaling = {"rope_type": "linear", "factor": float(config.rope_scale)}
    if config.rope_scale == 1:
        scaling = {"rope_type": "default"}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": config.vocab_size, "max_position_embeddings": config.context_length,
        "num_hidden_layers": config.n_layers, "hidden_size": config.d_model,
        "intermediate_size": config.d_ff, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_size,
        "hidden_act": "silu", "rms_norm_eps": config.norm_eps,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        # transformers 5 reads the first of these, older versions and other engines the rest.
        "rope_parameters": {"rope_theta": float(config.rope_base), **scaling},
        "rope_theta": float(config.rope_base),
        "rope_scaling": None if config.rope_scale == 1 else scaling,
    }


def llama_weights(model: Decoder) -> dict[str, Tensor]:
    """The weights under a Llama's names, without the tied head.

    They are float16 if no weight changes by that, else float32.
    """
    config = model.config

    def halves(weight: Tensor) -> Tensor:  # of a head: rows 2i, 2i + 1 to i, i + head_size / 2
        pairs = weight.unflatten(0, (-1, config.head_size // 2, 2))
        return pairs.transpose(1, 2).reshape(weight.shape)

    weights = {"model.embed_tokens.weight": model.token_embedding.weight,
               "model.norm.weight": model.final_norm.weight}
    for layer, block in enumerate(model.blocks):
        attention, feed_forward = block.attention, block.feed_forward
        weights |= {f"model.layers.{layer}.{name}.weight": weight for name, weight in (
            ("input_layernorm", block.attention_norm.weight),
            ("self_attn.q_proj", halves(attention.query.weight)),
            ("self_attn.k_proj", halves(attention.key.weight)),
            ("self_attn.v_proj", attention.value.weight),
            ("self_attn.o_proj", attention.output.weight),
            ("post_attention_layernorm", block.feed_forward_norm.weight),
            ("mlp.gate_proj", feed_forward.gate.weight),
            ("mlp.up_proj", feed_forward.up.weight),
            ("mlp.down_proj", feed_forward.down.weight),
        )}
    half = {name: weight.detach().half() for name, weight in weights.items()}
    lossless = all(torch.equal(half[name].float(), weight) for name, weight in weights.items())
    return half if lossless else {name: weight.detach() for name, weight in weights.items()}


def write_folder(folder: Path, model: Decoder,
                 tokenizer: sentencepiece.SentencePieceProcessor) -> None:
    """Write all the files into `folder`, which exists and is empty."""
    from safetensors.torch import save

    unknown = tokenizer.id_to_piece(tokenizer.unk_id())
    weights = llama_weights(model)
    dtype = str(weights["model.norm.weight"].dtype).removeprefix("torch.")
    # <unk> pads: with byte fallback no text has it.
    special = {"bos_token_id": tokenizer.bos_id(), "eos_token_id": tokenizer.eos_id(),
               "pad_token_id": tokenizer.unk_id()}
    for name, content in (
        ("config.json", llama_config(model.config) | {"torch_dtype": dtype} | special),
        ("generation_config.json", special),
        ("tokenizer.json", tokenizer_json(tokenizer)),
        ("tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.id_to_piece(tokenizer.bos_id()),
            "eos_token": tokenizer.id_to_piece(tokenizer.eos_id()),
            "unk_token": unknown, "pad_token": unknown,
            "split_special_tokens": True,  # "<s>" in a text is three characters, not BOS
            "add_prefix_space": False, "clean_up_tokenization_spaces": False,
            "model_max_length": model.config.context_length}),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    (folder / "tokenizer.model").write_bytes(tokenizer.serialized_model_proto())


def check_tokenizer(folder: Path, tokenizer: sentencepiece.SentencePieceProcessor) -> str:
    """What was found when random strings were encoded both ways.

    Raises RuntimeError for a string whose tokens differ.
    """
    try:
        import tokenizers
    except ModuleNotFoundError:
        return "tokenizer.json not checked: that needs tokenizers (pip install tokenizers)"
    converted = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    converted.encode_special_tokens = True
    choose = random.Random(0)
    pieces = [piece.replace(SPACE, " ")
              for piece in map(tokenizer.id_to_piece, range(tokenizer.vocab_size()))]
    for _ in range(500):
        text = "".join(choose.choices(pieces, k=choose.randint(1, 40)))
        if converted.encode(text, add_special_tokens=False).ids != tokenizer.encode(text):
            raise RuntimeError(f"tokenizer.json encodes {text!r} otherwise than sentencepiece")
    return "tokenizer.json and sentencepiece encode 500 random strings alike"


def export(target: Path, checkpoint: Path, tokenizer_file: Path) -> None:
    """Write the folder `target`, all of it or nothing.

    Raises FileExistsError if it is there already, ValueError for a model or a tokenizer that has
    no equal there, and what loading them raises.
    """
    if os.path.lexists(target):
        raise FileExistsError(f"{target} already exists")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is not a folder")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        say(f"reading {checkpoint} and {tokenizer_file}")
        model, tokenizer = load_checkpoint(checkpoint), load_tokenizer(tokenizer_file)
        if tokenizer.vocab_size() != model.config.vocab_size:
            raise ValueError(
                f"{tokenizer_file} has {tokenizer.vocab_size()} tokens, "
                f"{checkpoint} has {model.config.vocab_size}: they do not belong together")
        folder = Path(scratch) / target.name
        folder.mkdir()
        write_folder(folder, model, tokenizer)
        say(check_tokenizer(folder, tokenizer))
        folder.rename(target)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A checkpoint as a Hugging Face Llama folder.")
    parser.add_argument("folder", type=Path, help="the folder to make")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINTS / "octlm-26m.pt")
    parser.add_argument("--tokenizer", type=Path, default=CHECKPOINTS / "tokenizer.model")
    args = parser.parse_args(argv)
    try:
        export(args.folder, args.checkpoint, args.tokenizer)
    except KeyboardInterrupt:
        say("export.py: interrupted; nothing was written")
        return 1
    except ModuleNotFoundError as error:
        say(f"export.py: {error}: pip install safetensors==0.8.0")
        return 1
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        fault = str(error).partition("\n")[0] or type(error).__name__
        say(f"export.py: {fault}")
        return 1
    say(f"wrote {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
