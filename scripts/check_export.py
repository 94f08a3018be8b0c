"""Check the folder of scripts/export.py in a process that has transformers and no octlm.

    pip install transformers==5.24.0 safetensors==0.8.0
    python -m pytest scripts/check_export.py

The shipped model and small ones are exported; one fresh process reads all the folders, and its
logits, greedy tokens and token ids are compared with octlm's and sentencepiece's.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import export

from day5 import load_tokenizer
from octlm import Decoder, DecoderConfig, load_checkpoint, save_checkpoint

CHECKPOINT = ROOT / "checkpoints" / "octlm-26m.pt"
TOKENIZER = ROOT / "checkpoints" / "tokenizer.model"

READER = """
import sys, pathlib, torch, transformers
request = torch.load("request.pt")
answer = {"python path": sys.path}
for name, ids in request["ids"].items():
    model = transformers.AutoModelForCausalLM.from_pretrained(name)
    answer[name] = {"dtype": str(model.dtype), "special": [
        (part.bos_token_id, part.eos_token_id, part.pad_token_id)
        for part in (model.config, model.generation_config)]}
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        answer[name]["logits"] = model(ids).logits
        if name in request["greedy"]:
            answer[name]["greedy"] = model.generate(
                torch.tensor([[1]]), max_new_tokens=request["greedy"][name], do_sample=False)
for name, texts in request["texts"].items():
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    answer[name]["ids"] = ids
    answer[name]["decoded"] = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
torch.save(answer, "answer.pt")
"""

NASTY = [
    "", " ", "  ", "\n", "\n\n", " \n ", "\t", "\r\n", "\x00", "a\x00b", "\x7f", "\x85", "\u00a0",
    "\u2028\u2029", "\ufeff", "\u200b", "\u200d", "\u00ad", "\u202e", "\u2581", "a\u2581b",
    " \u2581 ", "\ufffd", "\u0301", "e\u0301", "\u00e9", "\u1100\u1161", "\uac00", "\ufb01",
    "\u212b", "\uff21", "\u00bd", "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1e9\U0001f1ea", "\U0010ffff", "\u0d9e", "\u4f60\u597d",
    "\u0645\u0631\u062d\u0628\u0627",
    "<s>", "</s>", "<unk>", "a<s>b", "<s></s>", " <s> ", "<s", "<unk", "<<s>>", "<pad>", "<0x41>",
    "<0x0A>", "<|endoftext|>", "[INST]", "1234567890", "1 2  3   4", "3.14159e-10", "$1,000.00",
    "a" * 300, " " * 300, "\n" * 40, "ab" * 150, "esese seses", "stersters", "aaaa aaaaa",
    "Once upon a time, there was a little girl.", " Once", "Once ", "ONCE UPON", "oNcE",
    "'s 't 're n't", "\u201cquoted\u201d \u2018single\u2019", "\u2014\u2013-", "...\u2026", "!?!?",
    "The end.\n\nOnce upon", "line\n indented\n\ttabbed", "trailing \n", " \n leading",
    "http://example.com/?a=b&c=d#e", "if (x < 3) { y[0] = \"z\"; }", "\\n \\t \\\\", "\\u2581",
]


def random_strings(count: int, pieces: list[str]) -> list[str]:
    """Joined from pieces of the tokenizer, special tokens as text, and any characters."""
    choose = random.Random(1)

    def part() -> str:
        kind = choose.random()
        if kind < 0.5:
            return choose.choice(pieces)
        if kind < 0.6:
            return choose.choice(["<s>", "</s>", "<unk>", "\n", " ", "  ", "\u2581"])
        if kind < 0.9:
            return chr(choose.randrange(32, 0x250))
        character = chr(choose.choice([choose.randrange(0x3000), choose.randrange(0x110000)]))
        return "" if "\ud800" <= character <= "\udfff" else character

    return ["".join(part() for _ in range(choose.randint(1, 30))) for _ in range(count)]


def train_tokenizer(path: Path, **changes) -> Path:
    """A sentencepiece model of 380 pieces that the conversion covers, but for the changes."""
    lines = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").split("\n") if line]
    trained = io.BytesIO()
    settings = {
        "model_type": "bpe", "vocab_size": 380, "byte_fallback": True, "minloglevel": 2,
        "normalization_rule_name": "identity", "add_dummy_prefix": False,
        "remove_extra_whitespaces": False, "user_defined_symbols": ["\n"], **changes}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=trained, **settings)
    path.write_bytes(trained.getvalue())
    return path


def save_small(path: Path, half: bool = True, **changes) -> Decoder:
    """Save a model with weights so large that attention is far from uniform."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{
        "vocab_size": 380, "context_length": 300, "n_layers": 2, "n_heads": 8, "d_model": 64,
        "d_ff": 48, **changes})).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, float(weight.ndim == 1), 0.15)
        if half:
            weight.data = weight.data.half().float()
    save_checkpoint(path, model)
    return model


SMALL = {
    "one key-value head": {"n_kv_heads": 1}, "two": {"n_kv_heads": 2}, "eight": {"n_kv_heads": 8},
    "scale 2": {"rope_scale": 2.0}, "scale 3.7": {"rope_scale": 3.7},
    "base": {"rope_base": 50.0}, "base and scale": {"rope_base": 500, "rope_scale": 3.7},
    "eps": {"norm_eps": 0.1}, "float32": {"half": False}, "manual": {"attention": "manual"},
}


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


@pytest.fixture(scope="session")
def read(tmp_path_factory, small_tokenizer) -> tuple[dict, dict, dict]:
    """Models by name, what the other process was asked, and what it answered."""
    folder = tmp_path_factory.mktemp("read")
    models = {"shipped": load_checkpoint(CHECKPOINT)}
    export.export(folder / "shipped", CHECKPOINT, TOKENIZER)
    for name, changes in SMALL.items():
        models[name] = save_small(folder / "model.pt", **changes)
        export.export(folder / name, folder / "model.pt", small_tokenizer)
    story = load_tokenizer(TOKENIZER)
    pieces = [story.id_to_piece(i).replace("\u2581", " ") for i in range(story.vocab_size())]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    request = {
        "ids": {name: torch.randint(380, (1, 300), generator=generator) for name in SMALL},
        "greedy": {"shipped": 500},
        "texts": {name: NASTY + random_strings(4000, pieces) + [text] for name in
                  ("shipped", "two")},
    }
    request["ids"]["shipped"] = torch.tensor([[1, *story.encode(text)[:299]]])
    torch.save(request, folder / "request.pt")
    result = subprocess.run([sys.executable, "-I", "-c", READER], cwd=folder, text=True,
                            capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, result.stderr
    answer = torch.load(folder / "answer.pt")
    assert not any((Path(path) / "octlm.py").exists() for path in answer["python path"])
    return models, request, answer


@pytest.mark.parametrize("name", ["shipped", *SMALL])
def test_logits_of_another_process(read, name):
    models, request, answer = read
    with torch.inference_mode():
        expected = models[name](request["ids"][name])
    torch.testing.assert_close(answer[name]["logits"], expected, rtol=0, atol=1e-4)
    assert answer[name]["dtype"] == ("torch.float32" if name == "float32" else "torch.float16")
    assert answer[name]["special"] == [(1, 2, 0), (1, 2, 0)]


def test_greedy_tokens_of_another_process(read):
    models, _, answer = read
    expected = models["shipped"].generate_cached(torch.tensor([[1]]), 500)
    assert answer["shipped"]["greedy"].tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["shipped", "two"])
def test_token_ids_of_another_process(read, small_tokenizer, name):
    _, request, answer = read
    path = TOKENIZER if name == "shipped" else small_tokenizer
    tokenizer = load_tokenizer(path)
    texts = request["texts"][name]
    expected = tokenizer.encode(texts)
    wrong = [text for text, ids, given in zip(texts, expected, answer[name]["ids"])
             if given != [1, *ids]]
    assert not wrong, f"{len(wrong)} of {len(texts)}, such as {wrong[0]!r}"
    assert answer[name]["decoded"] == tokenizer.decode(expected)


def run(capsys, *arguments: object) -> tuple[int, list[str]]:
    """Exit status and the lines on stderr."""
    status = export.main([str(argument) for argument in arguments])
    return status, capsys.readouterr().err.splitlines()


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder to export into; what else a test writes is not in it."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.mark.parametrize("changes, fault", [
    ({"position": "learned"}, "learned positions"),
    ({"attention_window": 8}, "an attention window"),
    ({"attention_window": 8, "kv_compress_block": 2}, "compressed keys and values"),
    ({"vocab_size": 381}, "has 381: they do not belong together"),
])
def test_refused_models(place, small_tokenizer, capsys, changes, fault):
    save_small(place.parent / "model.pt", **changes)
    status, lines = run(capsys, place / "out", "--checkpoint", place.parent / "model.pt",
                        "--tokenizer", small_tokenizer)
    assert status == 1 and fault in lines[-1] and len(lines) == 2
    assert not list(place.iterdir())


@pytest.mark.parametrize("changes, fault", [
    ({"model_type": "unigram"}, "a BPE model"),
    ({"byte_fallback": False}, "byte fallback"),
    ({"treat_whitespace_as_suffix": True}, "spaces before words"),
    ({"normalization_rule_name": "nmt_nfkc"}, "normalization 'identity'"),
    ({"add_dummy_prefix": True}, "no dummy prefix"),
    ({"remove_extra_whitespaces": True}, "whitespace kept"),
    ({"user_defined_symbols": ["\n", "tok"]}, "no user-defined pieces but the newline"),
    ({"eos_id": -1}, "a BOS and an EOS token"),
    ({"bos_id": -1}, "no beginning-of-text token"),
])
def test_refused_tokenizers(place, capsys, changes, fault):
    path = train_tokenizer(place.parent / "tokenizer.model", **changes)
    save_small(place.parent / "model.pt")
    status, lines = run(capsys, place / "out", "--checkpoint", place.parent / "model.pt",
                        "--tokenizer", path)
    assert status == 1 and fault in lines[-1] and len(lines) == 2
    assert not list(place.iterdir())


def test_what_exists_is_not_touched(place, capsys):
    (place / "full").mkdir()
    (place / "full" / "mine").write_text("mine")
    (place / "empty").mkdir()
    (place / "file").write_text("mine")
    (place / "dangling").symlink_to("nowhere")
    before = sorted(place.iterdir())
    for path in before:
        status, lines = run(capsys, path)
        assert status == 1 and len(lines) == 1 and lines[0].endswith("already exists")
    assert sorted(place.iterdir()) == before and not list((place / "empty").iterdir())
    assert (place / "full" / "mine").read_text() == (place / "file").read_text() == "mine"


@pytest.mark.parametrize("arguments", [
    ["nowhere/out"], ["out", "--checkpoint", "missing.pt"], ["out", "--tokenizer", "missing.model"],
    ["out", "--checkpoint", TOKENIZER], ["out", "--tokenizer", CHECKPOINT],
])
def test_missing_and_foreign_files(place, capsys, monkeypatch, arguments):
    monkeypatch.chdir(place)
    status, lines = run(capsys, *arguments)
    assert status == 1 and lines[-1].startswith("export.py: ") and len(lines) <= 2
    assert not list(place.iterdir())


def test_a_failure_half_way_leaves_nothing(place, small_tokenizer, capsys, monkeypatch):
    save_small(place.parent / "model.pt")
    arguments = (place / "out", "--checkpoint", place.parent / "model.pt",
                 "--tokenizer", small_tokenizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # less than the weights take
    try:
        status, lines = run(capsys, *arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1 and "File too large" in lines[-1]
    assert not list(place.iterdir())

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(export, "check_tokenizer", interrupt)
        assert run(capsys, *arguments) == (1, [
            f"reading {place.parent / 'model.pt'} and {small_tokenizer}",
            "export.py: interrupted; nothing was written"])
    assert not list(place.iterdir())

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.torch", None)
        status, lines = run(capsys, *arguments)
    assert status == 1 and lines[-1].endswith("pip install safetensors==0.8.0")
    assert not list(place.iterdir())


def test_it_says_whether_it_checked(place, small_tokenizer, capsys, monkeypatch):
    save_small(place.parent / "model.pt")
    arguments = ("--checkpoint", place.parent / "model.pt", "--tokenizer", small_tokenizer)
    status, lines = run(capsys, place / "checked", *arguments)
    assert status == 0 and lines[1].endswith("encode 500 random strings alike")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        status, lines = run(capsys, place / "unchecked", *arguments)
    assert status == 0 and "not checked" in lines[1]
    convert = export.tokenizer_json

    def reversed_merges(tokenizer: sentencepiece.SentencePieceProcessor) -> dict:
        content = convert(tokenizer)
        content["model"]["merges"].reverse()
        return content

    monkeypatch.setattr(export, "tokenizer_json", reversed_merges)
    status, lines = run(capsys, place / "wrong", *arguments)
    assert status == 1 and "otherwise than sentencepiece" in lines[-1]
    names = {path.name: {file.name for file in path.iterdir()} for path in place.iterdir()}
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
             "tokenizer_config.json", "tokenizer.model"}
    assert names == {"checked": files, "unchecked": files}
    assert (place / "checked" / "tokenizer.model").read_bytes() == small_tokenizer.read_bytes()
    assert json.loads((place / "checked" / "config.json").read_text())["vocab_size"] == 380
