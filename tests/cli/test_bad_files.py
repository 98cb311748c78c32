"""Bad files that reach a command: exit code 2, one line that names the file, and nothing is lost.

Every case changes one file of a right input. The line names the file, and the line number where
there is one. The command must not change the input: a checkpoint that cannot be read stays.

test_wrong_input.py has wrong flags and paths. tests/train/test_hugging_face.py has more damaged
folders, and tests/train/test_checkpoint_damage.py flips every kind of bit.
"""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from worlds import run_tutti

pytestmark = pytest.mark.timeout(200)

SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
SECOND = "model-00002-of-00007.safetensors"
GOOD = json.dumps({"prompt": "a", "completion": "b"})
MODULE = """
import torch
from torch import nn
def make():
    return nn.Linear(8, 4)
def samples():
    x = torch.ones(32, 8)
    return (x, torch.arange(32) % 4), (x, torch.arange(32) % 4)
def labels():
    x = torch.ones(32, 8)
    y = torch.arange(32) % 4
    y[20] = 99
    return (x, y), (x, y)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of transformers, data and a run; every case copies what it changes."""
    import transformers as hf
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    model.save_pretrained(path / "model", max_shard_size="20KB")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: i for i, each in enumerate([*alphabet[:-1], "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(path / "model")
    assert (path / "model" / SECOND).is_file()
    (path / "text.txt").write_text("the cat sat on a mat. " * 100)
    (path / "mine.py").write_text(MODULE)
    for name in ("cat", "dog"):
        (path / "images" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (8, 8)).save(path / "images" / name / f"{number}.png")
    done = run_tutti("train", *OWN, "--steps", "1", "--out", path / "run", cwd=path)
    assert done.returncode == 0, done.stderr
    return path


OWN = ["--model", "mine:make", "--dataset", "mine:samples", "--device", "cpu", "--batch", "4"]
TRAIN = ["--device", "cpu", "--steps", "1", "--seq-len", "16", "--out", "out"]
TEXT = ["--dataset", "text:text.txt"]
Change = Callable[[Path], None]


def replaced(name: str, content: bytes | str) -> Change:
    """Return a change that writes a file with other content."""

    def change(path: Path) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def config(**values: Any) -> Change:
    def change(path: Path) -> None:
        file = path / "model/config.json"
        kept = json.loads(file.read_text()) | values
        file.write_text(json.dumps({k: v for k, v in kept.items() if v is not None}))

    return change


def index(change_map: Callable[[dict[str, str]], Any]) -> Change:
    def change(path: Path) -> None:
        file = path / "model/model.safetensors.index.json"
        content = json.loads(file.read_text())
        changed = change_map(content["weight_map"])
        file.write_text(json.dumps({"weight_map": content["weight_map"], **(changed or {})}))

    return change


def header(entries: dict[str, Any], data: int) -> Change:
    """Return a change of the second weight file: a header with these entries, and zeros."""
    text = json.dumps(entries).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(data)
    return replaced(f"model/{SECOND}", content)


def only_bin(path: Path) -> None:
    for file in (path / "model").glob("model*"):
        file.unlink()
    (path / "model/pytorch_model.bin").write_bytes(b"x")


def directory_in_place_of(name: str) -> Change:
    def change(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).mkdir(parents=True)

    return change


def lines(number: int, line: str) -> Change:
    return replaced("data.jsonl", "\n".join([GOOD] * (number - 1) + [line, GOOD]))


def parquet(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["a", "b"]}), path / "data.parquet")


def tokens(content: bytes, vocabulary: int) -> Change:
    def change(path: Path) -> None:
        for name in ("train", "test"):
            (path / f"{name}.bin").write_bytes(content)
        description = {"dtype": "uint16", "vocabulary": vocabulary}
        (path / "tokens.json").write_text(json.dumps(description))

    return change


def no_change(path: Path) -> None:
    pass


HF = ["train", "--model", "hf:model", *TRAIN]
JSONL = [*HF, "--dataset", "jsonl:data.jsonl"]
IMAGES = ["train", "--recipe", "lenet", "--dataset", "images:images", *TRAIN[:4], "--out", "out"]
MPI = ["submit", "mpi", "--dry-run"]
PROGRAM = ["--", "python", "mine.py"]

# name: (change, command line, text that the message must have)
CASES: dict[str, tuple[Change, list[str], str]] = {
    # -- folders of models
    "index is not JSON": (
        replaced("model/model.safetensors.index.json", "{"),
        [*HF, *TEXT],
        "model.safetensors.index.json is not JSON",
    ),
    "index without weight_map": (
        index(lambda each: {"weight_map": {}}),
        [*HF, *TEXT],
        "model.safetensors.index.json has no weight_map",
    ),
    "index names a file outside": (
        index(lambda each: each.update({"lm_head.weight": "../x.safetensors"})),
        [*HF, *TEXT],
        "../x.safetensors, which is outside of the folder",
    ),
    "index names a missing file": (
        index(lambda each: each.update({"lm_head.weight": "x.safetensors"})),
        [*HF, *TEXT],
        "x.safetensors is missing",
    ),
    "index with a number for a file": (
        index(lambda each: each.update({"lm_head.weight": 3})),
        [*HF, *TEXT],
        "model.safetensors.index.json",
    ),
    "config is a list": (replaced("model/config.json", "[]"), [*HF, *TEXT], "not a JSON object"),
    "config is not UTF-8": (
        replaced("model/config.json", b"\xff\xfe{}"),
        [*HF, *TEXT],
        "config.json is not JSON",
    ),
    "config is missing": (
        directory_in_place_of("model/config.json"),
        [*HF, *TEXT],
        "config.json cannot be read",
    ),
    "model is a file": (no_change, ["train", "--model", "hf:text.txt", *TRAIN, *TEXT], "is a file"),
    "weights as pickle": (only_bin, [*HF, *TEXT], "convert pytorch_model.bin"),
    "header of 2⁶³ bytes": (
        replaced(f"model/{SECOND}", b"\xff" * 8 + b"{}"),
        [*HF, *TEXT],
        f"{SECOND} is truncated",
    ),
    "header is a list": (
        header([], 0),  # type: ignore[arg-type]
        [*HF, *TEXT],
        f"{SECOND} is truncated or not",
    ),
    "offsets beyond the file": (
        header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 8),
        [*HF, *TEXT],
        f"{SECOND} is truncated",
    ),
    "unknown architecture": (config(model_type="unknown"), [*HF, *TEXT], "config.json: trans"),
    "no causal language model": (config(model_type="vit"), [*HF, *TEXT], "config.json: "),
    "shapes differ from config": (
        config(hidden_size=64, head_dim=16),
        [*HF, *TEXT],
        "config.json gives",
    ),
    "more layers than weights": (config(num_hidden_layers=3), [*HF, *TEXT], "model.layers.2"),
    "a size is a text": (config(hidden_size="many"), [*HF, *TEXT], "hidden_size"),
    "sequence longer than the model's": (
        no_change,
        [*HF, *TEXT, "--seq-len", "128"],
        "--seq-len 128",
    ),
    "vocabulary mismatch": (
        tokens(b"ab" * 999, 999),
        [*HF, "--dataset", "tokens", "--data-dir", "."],
        "999",
    ),
    # -- data
    "text is missing": (no_change, [*HF, "--dataset", "text:none.txt"], "none.txt"),
    "text is empty": (replaced("text.txt", ""), [*HF, *TEXT], "text.txt"),
    "text is not UTF-8": (
        replaced("text.txt", b"good\n" * 3 + b"bad \xe9\n" * 200),
        [*HF, *TEXT],
        "text.txt:4",
    ),
    "folder without texts": (no_change, [*HF, "--dataset", "text:images/cat"], "images/cat"),
    "broken line 10,000": (lines(10_000, '{"prompt": '), JSONL, "data.jsonl:10000"),
    "field is missing": (lines(3, '{"prompt": "a"}'), JSONL, "data.jsonl:3"),
    "field of a wrong type": (
        lines(4, '{"prompt": 3, "completion": "b"}'),
        JSONL,
        "data.jsonl:4: the field prompt is int",
    ),
    "completion is empty": (
        lines(5, '{"prompt": "a", "completion": ""}'),
        JSONL,
        "data.jsonl:5",
    ),
    "record longer than a sample": (
        lines(6, json.dumps({"prompt": "a" * 90, "completion": "b"})),
        JSONL,
        "data.jsonl:6",
    ),
    "a line is a list": (lines(7, "[1]"), JSONL, "data.jsonl:7"),
    "jsonl is empty": (replaced("data.jsonl", ""), JSONL, "data.jsonl"),
    "jsonl is a directory": (directory_in_place_of("data.jsonl"), JSONL, "data.jsonl"),
    "parquet with another column": (
        parquet,
        [*HF, "--dataset", "parquet:data.parquet"],
        "data.parquet",
    ),
    "not a parquet file": (
        replaced("data.parquet", b"PAR1"),
        [*HF, "--dataset", "parquet:data.parquet"],
        "data.parquet",
    ),
    "image does not decode": (replaced("images/cat/3.png", b"\x89PNG broken"), IMAGES, "3.png"),
    "image is truncated": (replaced("images/dog/4.png", b""), IMAGES, "4.png"),
    "images are a file": (
        no_change,
        [part.replace("images:images", "images:text.txt") for part in IMAGES],
        "text.txt",
    ),
    "images without classes": (
        no_change,
        [part.replace("images:images", "images:images/cat") for part in IMAGES],
        "images/cat",
    ),
    "label out of range": (
        no_change,
        ["train", "--model", "mine:make", "--dataset", "mine:labels", *TRAIN[:4], "--out", "out"],
        "99",
    ),
    "token file is too short": (
        tokens(b"ab", 256),
        [*HF, "--dataset", "tokens", "--data-dir", "."],
        "train.bin",
    ),
    "tokenizer without an end token": (
        replaced("model/tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}'),
        [*HF, *TEXT],
        "the tokenizer in model has no end token",
    ),
    "tokenizer is not JSON": (
        replaced("model/tokenizer.json", "{"),
        [*HF, *TEXT],
        "model",
    ),
    # -- hosts
    "no hosts": (no_change, [*MPI, "--hosts=", *PROGRAM], "--hosts"),
    "ranks of a host are no number": (no_change, [*MPI, "--hosts=a:2,b:x", *PROGRAM], "b:x"),
    "a host with 0 ranks": (no_change, [*MPI, "--hosts=a:0", *PROGRAM], "a:0"),
    "ranks without a host": (no_change, [*MPI, "--hosts=a:1,:2", *PROGRAM], ":2"),
    # -- export
    "target is not empty": (no_change, ["export", "--run", "run", "--to", "images"], "images"),
    "target is a file": (no_change, ["export", "--run", "run", "--to", "text.txt"], "text.txt"),
    "hf format of another model": (
        no_change,
        ["export", "--run", "run", "--to", "to", "--format", "hf"],
        "--format hf",
    ),
}


def checkpoint_file(path: Path, pattern: str) -> Path:
    return next(iter(sorted((path / "run/checkpoints").glob(f"step-*/{pattern}"))))


def flipped_bit(path: Path) -> None:
    file = checkpoint_file(path, "*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def truncated(path: Path) -> None:
    file = checkpoint_file(path, "*.safetensors")
    file.write_bytes(file.read_bytes()[:-9])


def missing(path: Path) -> None:
    checkpoint_file(path, "*.safetensors").unlink()


def wrong_index(path: Path) -> None:
    checkpoint_file(path, "*.json").write_text('{"schema": 3}')


USES = {
    "resume": ["train", "--resume", "--out", "run", "--steps", "2", "--device", "cpu"],
    "init-from": ["train", *OWN, "--steps", "1", "--init-from", "run", "--out", "out"],
    "predict": ["predict", "--run", "run", "--device", "cpu"],
    "export": ["export", "--run", "run", "--to", "to"],
}
for use, words in USES.items():
    for damage in (flipped_bit, truncated, missing, wrong_index):
        CASES[f"{use}: {damage.__name__}"] = (damage, words, "step-00000001")


def digests(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file() and not {"out", "__pycache__", ".cache"} & set(file.parts)
    }


@pytest.mark.parametrize("name", CASES)
def test_a_bad_file_is_named_in_one_line_and_nothing_is_lost(
    name: str, inputs: Path, tmp_path: Path
) -> None:
    change, words, expected = CASES[name]
    path = tmp_path / "case"
    shutil.copytree(inputs, path)
    change(path)
    before = digests(path)
    done = run_tutti(*words, cwd=path, env={"XDG_CACHE_HOME": str(inputs.with_name("cache"))})
    # Lines before the error are notes about the recipe; the error is the last line.
    errors = [line for line in done.stderr.splitlines() if line.startswith(f"tutti {words[0]}: ")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert expected in errors[0] and "Traceback" not in done.stderr, done.stderr
    after = digests(path)
    lost = {file for file, digest in before.items() if after.get(file) != digest}
    assert not lost
    assert not (path / "to").exists()


def test_there_are_many_kinds() -> None:
    assert len(CASES) >= 60


def test_a_full_disk_during_export_leaves_no_half_written_folder(
    inputs: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", small], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr}")
    try:
        (small / "full").write_bytes(bytes(12 << 10))
        done = run_tutti("export", "--run", inputs / "run", "--to", small / "to")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "No space left" in done.stderr or "full" in done.stderr
        assert [file.name for file in small.iterdir()] == ["full"]
    finally:
        subprocess.run(["umount", small], check=True)
