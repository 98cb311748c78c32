"""Datasets of the user's own files: text, JSON Lines, Parquet and folders of images."""

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tutti.data import DataError, Dataset, document_dataset, image_folder_dataset
from tutti.data.documents import IGNORED, ByteTokenizer, tokenize


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A word tokenizer with a start and an end token, saved as transformers saves one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(100))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    fast = Tokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.save_pretrained(folder)
    return folder


def write_records(path: Path, records: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def all_samples(dataset: Dataset) -> list[tuple[list[int], list[int]]]:
    rows = []
    for samples in (dataset.train, dataset.test):
        inputs, targets = samples.batch(torch.arange(len(samples)))
        rows += list(zip(inputs.tolist(), targets.tolist(), strict=True))
    return rows


text = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.tuples(text, text.filter(bool)), min_size=2, max_size=30),
    st.sampled_from(["jsonl", "parquet"]),
)
def test_only_the_tokens_of_a_completion_are_targets(
    tmp_path: Path, pairs: list[tuple[str, str]], kind: str
) -> None:
    path = write_records(
        tmp_path / f"pairs.{kind}", [{"prompt": p, "completion": c} for p, c in pairs]
    )
    dataset = document_dataset(kind, path, 128, None)
    assert dataset.padded and dataset.vocabulary == 256
    samples = all_samples(dataset)
    assert len(samples) == len(pairs) and len(dataset.test) == max(1, round(len(pairs) * 0.05))
    for (prompt, completion), (inputs, targets) in zip(pairs, samples, strict=True):
        expected = list(prompt.encode() + completion.encode())
        assert inputs[: len(expected)] == expected
        has_loss = [target for target in targets if target != IGNORED]
        # The first token of a sample follows no token, so it cannot be predicted.
        assert has_loss == [*completion.encode(), 0][0 if prompt else 1 :]


def test_texts_are_packed_with_an_end_token_after_each_document(
    tmp_path: Path, tokenizer: Path
) -> None:
    texts = [" ".join(f"w{(7 * i + j) % 100}" for j in range(i % 9)) for i in range(60)]
    path = write_records(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, content in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(content)
    stream = []
    for content in texts:
        stream += [0, *(3 + int(word[1:]) for word in content.split()), 1]
    for kind, source in (("jsonl", path), ("text", folder)):
        dataset = document_dataset(kind, source, 16, tokenizer)
        assert dataset.vocabulary == 103
        inputs, targets = dataset.train.batch(torch.arange(len(dataset.train)))
        count = 16 * len(dataset.train)
        assert inputs.flatten().tolist() == stream[:count]
        assert targets.flatten().tolist() == stream[1 : count + 1]


def _tokenize_in_a_process(path: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(len(tokenize("jsonl", path, ByteTokenizer()).tokens))


def test_ranks_tokenize_once_and_changed_or_damaged_files_again(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(20_000)])
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    ranks = [
        context.Process(target=_tokenize_in_a_process, args=(path, barrier, results))
        for _ in range(3)
    ]
    for rank in ranks:
        rank.start()
    counts = {results.get(timeout=60) for _ in ranks}
    for rank in ranks:
        rank.join()
    assert len(counts) == 1
    cached = [d for d in (tmp_path / "cache/tutti/tokens").iterdir() if d.is_dir()]
    assert len(cached) == 1  # and no temporary directory is left
    before = (cached[0] / "tokens.raw").stat().st_mtime_ns
    tokenize("jsonl", path, ByteTokenizer())
    assert (cached[0] / "tokens.raw").stat().st_mtime_ns == before
    with (cached[0] / "tokens.raw").open("r+b") as file:
        file.truncate(10)
    assert len(tokenize("jsonl", path, ByteTokenizer()).tokens) in counts
    write_records(path, [{"text": "other"}])
    assert bytes(tokenize("jsonl", path, ByteTokenizer()).tokens) == b"other\0"


def test_wrong_records_are_named_with_their_line(tmp_path: Path, tokenizer: Path) -> None:
    good = json.dumps({"prompt": "a", "completion": "b"})
    path = tmp_path / "records.jsonl"
    for line, expected in (
        ('{"prompt": "a", "completion": ', "not JSON"),
        ("[1, 2]", "`prompt` and `completion`"),
        ('{"prompt": "a"}', "text is missing"),
        ('{"prompt": 3, "completion": "b"}', "prompt is int"),
        ('{"prompt": "a", "completion": ""}', "completion is empty"),
        ('{"text": "a"}', "other fields"),
        ("\xff\xfe", "not JSON"),
    ):
        lines = [good] * 9_999 + [line] + [good]
        path.write_bytes("\n".join(lines).encode("latin-1"))
        with pytest.raises(DataError, match=rf"records\.jsonl:10000.*{expected}"):
            document_dataset("jsonl", path, 64, None)
    write_records(path, [{"prompt": "a", "completion": "b" * n} for n in (5, 80, 7, 9)])
    with pytest.raises(DataError, match=r"records\.jsonl:2: .* 81 tokens.*--seq-len 81"):
        document_dataset("jsonl", path, 64, None)
    (tmp_path / "not.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"not\.parquet is not a readable Parquet file"):
        document_dataset("parquet", tmp_path / "not.parquet", 64, None)
    (tmp_path / "latin.txt").write_bytes(b"first line\nsecond \xe9 line\n" * 40)
    with pytest.raises(DataError, match=r"latin\.txt:2: byte 0xe9 is not UTF-8"):
        document_dataset("text", tmp_path / "latin.txt", 8, tokenizer)
    damaged = tmp_path / "damaged"
    shutil.copytree(tokenizer, damaged)
    (damaged / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer in .*damaged cannot be read"):
        document_dataset("jsonl", path, 64, damaged)
    with pytest.raises(DataError, match="has no tokenizer files"):
        document_dataset("jsonl", path, 64, tmp_path)


def test_images_have_the_class_of_their_folder(tmp_path: Path) -> None:
    colours = {"blue": (0, 0, 250), "green": (0, 240, 0), "red": (230, 0, 0)}
    for name, colour in colours.items():
        (tmp_path / "all" / name / "more").mkdir(parents=True)
        for number in range(25):
            size = (40 + number, 30)
            mode = "P" if number == 3 else "RGB"  # a palette image, as GIFs are
            suffix = ("png", "bmp")[number % 2]
            folder = tmp_path / "all" / name / ("more" if number > 20 else "")
            Image.new("RGB", size, colour).convert(mode).save(folder / f"{number:02}.{suffix}")
        (tmp_path / "all" / name / "notes.txt").write_text("not an image")
    dataset = image_folder_dataset(tmp_path / "all", pixels=16)
    assert dataset.classes == 3 and len(dataset.train) == 72 and len(dataset.test) == 3
    for samples in (dataset.train, dataset.test):
        images, labels = samples.fetch(torch.arange(len(samples)))
        assert images.shape == (len(samples), 3, 16, 16) and images.dtype == torch.uint8
        expected = np.array([list(colours.values())[label] for label in labels])
        assert np.abs(images.float().mean((2, 3)).numpy() - expected).max() < 3
    # With the folders train and test, these are the two sets.
    shutil.copytree(tmp_path / "all", tmp_path / "split" / "train")
    shutil.copytree(tmp_path / "all", tmp_path / "split" / "val")
    split = image_folder_dataset(tmp_path / "split", pixels=8)
    assert len(split.train) == len(split.test) == 75
    broken = tmp_path / "all" / "green" / "00.png"
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(DataError, match=r"green/00\.png cannot be decoded"):
        dataset.train.batch(torch.arange(len(dataset.train)))
    (tmp_path / "split" / "val" / "yellow").mkdir()
    with pytest.raises(DataError, match="yellow is a class"):
        image_folder_dataset(tmp_path / "split", pixels=8)
    shutil.rmtree(tmp_path / "all" / "red")
    (tmp_path / "all" / "red").mkdir()
    with pytest.raises(DataError, match="red has no images"):
        image_folder_dataset(tmp_path / "all", pixels=8)
