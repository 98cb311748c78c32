"""Damaged and forged checkpoints are detected, named, and the previous checkpoint is used."""

import ast
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from tutti.train.checkpoint import Checkpoints
from tutti.train.checkpoint.format import Damaged, open_tensors, saved_steps
from tutti.train.checkpoint.load import verify
from tutti.world.errors import UsageError

FILES = ("rank0.safetensors", "index.json", "SHA256SUMS")


def constant_model(value: float) -> nn.Module:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    return model


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    with Checkpoints(directory) as checkpoints:
        for step in (1, 2):
            model = constant_model(step)
            checkpoints.save(step, model, torch.optim.AdamW(model.parameters()))
    return directory


@pytest.fixture
def directory(two_checkpoints: Path, tmp_path: Path) -> Path:
    """A copy of the two checkpoints: all weights are 1 in step 1 and 2 in step 2."""
    return Path(shutil.copytree(two_checkpoints, tmp_path / "copy"))


@pytest.fixture
def newest(directory: Path) -> Path:
    return directory / "step-00000002"


def loaded_value(directory: Path) -> float:
    model = constant_model(0)
    Checkpoints(directory).load(model, torch.optim.AdamW(model.parameters()))
    values = {float(value) for value in model.weight.detach().view(-1)}
    assert len(values) == 1
    return values.pop()


def is_detected(checkpoint: Path) -> bool:
    return isinstance(verify(checkpoint, 0, 1), str)


def test_an_undamaged_newest_checkpoint_is_used(directory: Path, newest: Path) -> None:
    assert not is_detected(newest)
    assert loaded_value(directory) == 2


@pytest.mark.parametrize("file", FILES)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_detected(
    newest: Path, file: str, place: float, bit: int
) -> None:
    content = bytearray((newest / file).read_bytes())
    offset = int(place * len(content))
    content[offset] ^= 1 << bit
    (newest / file).write_bytes(content)
    assert is_detected(newest)
    content[offset] ^= 1 << bit
    (newest / file).write_bytes(content)
    assert not is_detected(newest)


def test_every_flipped_bit_of_the_checksums_is_detected(newest: Path) -> None:
    whole = (newest / "SHA256SUMS").read_bytes()
    for bit in range(8 * len(whole)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << (bit % 8)
        (newest / "SHA256SUMS").write_bytes(content)
        assert is_detected(newest), bit


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def add(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def link(path: Path) -> None:
    shutil.copy(path, path.parents[2] / "elsewhere")
    path.unlink()
    path.symlink_to(path.parents[2] / "elsewhere")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "truncated": cut,
    "emptied": lambda path: os.truncate(path, 0),
    "extended": add,
    "removed": lambda path: path.unlink(),
    "linked": link,
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(
    directory: Path, newest: Path, file: str, damage: str, capsys: Any
) -> None:
    DAMAGES[damage](newest / file)
    assert loaded_value(directory) == 1
    errors = capsys.readouterr().err
    assert "step-00000002 is damaged: " in errors and errors.count("\n") == 1
    # If a bit of SHA256SUMS is flipped, the message names the file whose checksum was changed.
    assert file in errors or file == "SHA256SUMS"


def test_if_all_checkpoints_are_damaged_nothing_is_changed(directory: Path) -> None:
    for path in directory.glob("step-*/rank0.safetensors"):
        flip(path)
    model = constant_model(7)
    with pytest.raises(UsageError, match=r"no complete .*\. step-00000001 is damaged: rank0"):
        Checkpoints(directory).load(model)
    assert torch.equal(model.weight, constant_model(7).weight)


def test_a_requested_step_that_is_damaged_is_an_error(directory: Path, newest: Path) -> None:
    cut(newest / "index.json")
    with pytest.raises(UsageError, match=r"step-00000002 is damaged: index\.json"):
        Checkpoints(directory).load(constant_model(0), step=2)


def test_a_damaged_checkpoint_does_not_count_for_keep(directory: Path, newest: Path) -> None:
    flip(newest / "rank0.safetensors")
    with Checkpoints(directory, keep=1) as checkpoints:
        step = checkpoints.load(constant_model(0)).step
        assert step == 1
        checkpoints.save(step, constant_model(1))
    assert saved_steps(directory) == [1] and loaded_weight(directory) == 1


def loaded_weight(directory: Path) -> float:
    model = constant_model(0)
    Checkpoints(directory).load(model)
    return float(model.weight.detach()[0, 0])


def test_an_unfinished_checkpoint_is_ignored_then_removed(directory: Path, newest: Path) -> None:
    leftover = directory / "step-00000009.0123abcd.tmp"
    shutil.copytree(newest, leftover)
    (directory / "step-00000009.backup").mkdir()  # tutti does not write such a name: must stay
    assert loaded_value(directory) == 2
    assert leftover.exists()  # loading changes nothing
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(3, constant_model(3))
    assert not leftover.exists() and (directory / "step-00000009.backup").exists()
    assert saved_steps(directory) == [1, 2, 3]


# In the tests below the checksums are valid: the files are forged, not damaged.


def forge(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((checkpoint / "index.json").read_text())
    change(index)
    (checkpoint / "index.json").write_text(json.dumps(index))
    sign(checkpoint)


def sign(checkpoint: Path) -> None:
    lines = [
        f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("index.json", "rank0.safetensors")
    ]
    (checkpoint / "SHA256SUMS").write_text("".join(lines))


def first_chunk(index: dict[str, Any]) -> dict[str, Any]:
    chunk: dict[str, Any] = index["tensors"]["model.weight"]["chunks"][0]
    return chunk


def weight(index: dict[str, Any]) -> dict[str, Any]:
    tensor: dict[str, Any] = index["tensors"]["model.weight"]
    return tensor


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a file outside": lambda i: i["files"].update({"../../secret": {"bytes": 3}}),
    "an absolute file": lambda i: i["files"].update({"/etc/passwd": {"bytes": 3}}),
    "a chunk outside": lambda i: first_chunk(i).update(file="../../secret"),
    "a chunk in a device": lambda i: first_chunk(i).update(file="/dev/zero"),
    "a chunk in no file": lambda i: first_chunk(i).update(file=None),
    "a key that is not there": lambda i: first_chunk(i).update(key="other"),
    "the bytes of another": lambda i: first_chunk(i).update(key="model.bias"),
    "an absurd shape": lambda i: weight(i).update(shape=[1 << 40, 1 << 40]),
    "an absurd shape and chunk": lambda i: (
        weight(i).update(shape=[1 << 40, 3]),
        first_chunk(i).update(sizes=[1 << 40, 3]),
    ),
    "a negative size": lambda i: first_chunk(i).update(sizes=[-2, -3]),
    "a negative offset": lambda i: first_chunk(i).update(offsets=[-1, 0]),
    "overlapping chunks": lambda i: weight(i).update(
        chunks=[
            {**first_chunk(i), "offsets": [0, 0], "sizes": [1, 3]},
            {**first_chunk(i), "offsets": [0, 0], "sizes": [1, 3]},
        ]
    ),
    "missing chunks": lambda i: weight(i).update(chunks=[]),
    "sizes that are not numbers": lambda i: first_chunk(i).update(sizes=["2", 3.0]),
    "an unknown dtype": lambda i: weight(i).update(dtype="OBJECT"),
    "another dtype": lambda i: weight(i).update(dtype="I32"),
    "a list of tensors": lambda i: i.update(tensors=[1, 2]),
    "no state": lambda i: i.pop("state"),
    "a state that is a number": lambda i: i.update(state=7),
    "another schema": lambda i: i.update(schema="tutti.checkpoint/999"),
    "a step that is not a number": lambda i: i.update(step=True),
    "a malformed optimizer": lambda i: i.update(optimizer=[]),
    "negative ranks": lambda i: i.update(ranks=-1),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_index_is_refused(
    directory: Path, newest: Path, forgery: str, capsys: Any, monkeypatch: Any
) -> None:
    (directory.parent / "secret").write_text("key")
    forge(newest, FORGERIES[forgery])
    opened: list[Path] = []
    real = os.open

    def watched(path: Any, *arguments: Any, **more: Any) -> int:
        opened.append(Path(path))
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", watched)
    assert loaded_value(directory) == 1
    assert "step-00000002 is damaged" in capsys.readouterr().err
    assert opened and {path.parent.parent for path in opened} == {directory}


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("file", FILES)
def test_a_pickle_in_place_of_a_file_is_refused_and_not_executed(
    directory: Path, newest: Path, tmp_path: Path, file: str
) -> None:
    content = pickle.dumps(Bomb(tmp_path / "exploded"))
    if file == "rank0.safetensors":
        forge(newest, lambda index: index["files"].update({file: {"bytes": len(content)}}))
    (newest / file).write_bytes(content)
    if file != "SHA256SUMS":
        sign(newest)
    assert loaded_value(directory) == 1
    assert not (tmp_path / "exploded").exists()


def test_a_forged_random_state_is_refused() -> None:
    """numpy does not check the position in its state: without our check it reads out of bounds."""
    from tutti.train.checkpoint.training_state import rng_state, set_rng_state

    state = rng_state()
    state["numpy"][624] = 1 << 30
    with pytest.raises(ValueError, match="Mersenne"):
        set_rng_state({"numpy": state["numpy"]})


def test_no_module_of_train_can_unpickle() -> None:
    folder = Path(__file__).parents[2] / "src" / "tutti" / "train"
    modules = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & modules, path.name
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) != "torch.load", path.name
                assert not node.attr.endswith(("_object", "_object_list")), path.name
            if isinstance(node, ast.Name):
                assert node.id not in ("eval", "exec"), path.name


def test_malformed_tensor_files_are_refused(tmp_path: Path) -> None:
    """Cases: truncated at any byte, no JSON header, overlapping tensors, directory, pipe, link."""
    whole = tmp_path / "whole"
    save_file({"a": torch.ones(5), "b": torch.ones(2, 2)}, whole)
    assert sorted(open_tensors(whole).keys()) == ["a", "b"]
    content = whole.read_bytes()
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    headers = [b"", b"[]", b"{" * 50, json.dumps({"a": entry, "b": entry}).encode()]
    cases = [content[:length] for length in range(len(content))]
    cases += [len(header).to_bytes(8, "little") + header + bytes(8) for header in headers]
    for case in cases:
        (tmp_path / "file").write_bytes(case)
        with pytest.raises(Damaged, match="file"):
            open_tensors(tmp_path / "file")
    (tmp_path / "link").symlink_to(whole)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "absent"):
        with pytest.raises(Damaged, match=name):
            open_tensors(tmp_path / name)
