"""Exports the weights of a checkpoint for other programs, one tensor at a time.

    model.safetensors                 the weights; more than 5 GB are divided into several files
    model.safetensors.index.json      the file of each tensor, if there are several files
    config.json, tokenizer.json, …    format hf: copied from the model's folder
    model.pt                          format state_dict: instead of safetensors, for torch.load
    README.md                         a model card with the recipe and the figures of the run

The folder is written under a temporary name and renamed when all files are complete.
"""

import json
import math
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tutti.measure.units import format_bytes
from tutti.models.pretrained import (
    ModelError,
    build_causal_lm,
    copy_side_files,
    read_folder,
    saved_form,
)
from tutti.parallel.materialize import build_with_buffers, read_shards
from tutti.train.checkpoint import format as checkpoint_format
from tutti.train.checkpoint.format import DTYPE_NAMES, DTYPES, Index
from tutti.train.checkpoint.load import chunks_of, verify
from tutti.train.recipe import Recipe, read_recipe
from tutti.world.errors import UsageError

Format = Literal["safetensors", "hf", "state_dict"]
_MAX_FILE_BYTES = 5_000_000_000
_PREFIX = "model."  # begins the name of every model tensor in a checkpoint


@dataclass(frozen=True)
class _Entry:
    """A tensor of the exported folder."""

    name: str
    source: str  # name of the tensor in the checkpoint
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Export:
    """The export of one checkpoint. The constructor checks the arguments, `write` writes files."""

    def __init__(self, run: Path, step: int | None, to: Path, kind: Format | None) -> None:
        if not (run / "recipe.toml").is_file():
            problem = "has no recipe.toml" if run.is_dir() else "does not exist"
            raise UsageError(f"--run {run} {problem}. Use the --out directory of tutti train.")
        self.run, self.to = run, to
        self.recipe: Recipe = read_recipe(str(run / "recipe.toml"))
        self.path, self.index = _complete_checkpoint(run / "checkpoints", step)
        is_hf = self.recipe.model.startswith("hf:")
        self.kind: Format = kind or ("hf" if is_hf else "safetensors")
        if self.kind == "hf" and not is_hf:
            raise UsageError(
                f"--format hf needs a run of --model hf:FOLDER, but {run} has the model "
                f"{self.recipe.model}. Use --format safetensors."
            )
        self.side_files = run / "model"
        if is_hf and not self.side_files.is_dir():
            self.side_files = Path(self.recipe.model.partition(":")[2])
        tensors = {
            name.removeprefix(_PREFIX): (DTYPES[saved["dtype"]], tuple(saved["shape"]))
            for name, saved in self.index["tensors"].items()
            if name.startswith(_PREFIX)
        }
        self._convert: Callable[[str, Tensor], Mapping[str, Tensor]] | None = None
        if self.kind == "hf":
            self._convert = self._conversion(tensors)
        self.entries = [
            _Entry(new_name, name, dtype, tuple(converted.shape))
            for name, (dtype, shape) in tensors.items()
            for new_name, converted in self._converted(
                name, torch.empty(shape, dtype=dtype, device="meta")
            )
        ]
        self._check_target()

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def _conversion(
        self, tensors: Mapping[str, Any]
    ) -> Callable[[str, Tensor], Mapping[str, Tensor]] | None:
        """Return the function that converts a tensor to the tensors that transformers saves.

        Return None if tensors are saved as they are in the model.
        """
        try:
            folder = read_folder(self.side_files, weights=False)
            model = build_with_buffers(lambda: build_causal_lm(folder))
        except ModelError as error:
            raise UsageError(f"--run {self.run}: {error}") from None
        return saved_form(model, {name: shape for name, (_, shape) in tensors.items()})

    def _converted(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        if self._convert is None:
            return [(name, tensor)]
        return [*self._convert(name, tensor).items()]

    def _check_target(self) -> None:
        to = self.to
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            problem = "is not empty" if to.is_dir() else "is a file"
            raise UsageError(f"--to {to} {problem}. Choose a new directory.")
        existing = next(p for p in (to, *to.absolute().parents) if p.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise UsageError(f"--to {to}: {existing} cannot be written. Choose another directory.")
        # A state_dict needs a second copy of the weights on the disk while it is written.
        needed = self.nbytes * (2 if self.kind == "state_dict" else 1)
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise UsageError(
                f"--to {to} needs {format_bytes(needed)}, but {existing} has {format_bytes(free)} "
                "free. Free space, or choose another directory."
            )

    def write(self) -> list[Path]:
        """Write the folder. Return its files. If writing fails, the folder is removed."""
        temporary = self.to.absolute().with_name(f".{self.to.name}.{os.urandom(4).hex()}.tmp")
        try:
            temporary.mkdir(parents=True)
            self._write_files(temporary)
            os.replace(temporary, self.to)
        except OSError as error:
            reason = f"{error.strerror or error}. Free space, or choose another directory."
            raise UsageError(f"--to {self.to} was not written: {reason}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return sorted(path for path in self.to.iterdir())

    def _write_files(self, folder: Path) -> None:
        files = _divide(self.entries, 1 << 62 if self.kind == "state_dict" else _MAX_FILE_BYTES)
        for name, entries in files.items():
            self._write_safetensors(folder / name, entries)
        if len(files) > 1:
            weight_map = {entry.name: name for name, group in files.items() for entry in group}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
            _write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
        if self.kind == "state_dict":
            (name,) = files
            _save_state_dict(folder / name, files[name], folder / "model.pt")
            (folder / name).unlink()
        if self.kind == "hf":
            copy_side_files(self.side_files, folder)
            self._write_config(folder / "config.json")
        _write_text(folder / "README.md", self._model_card())

    def _write_safetensors(self, file: Path, entries: list[_Entry]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in entries:
            offsets = [end, end + entry.nbytes]
            dtype = DTYPE_NAMES[entry.dtype]
            header[entry.name] = {"dtype": dtype, "shape": entry.shape, "data_offsets": offsets}
            end += entry.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for entry, tensor in self._read(entries):
                content = tensor.reshape(-1).view(torch.uint8).numpy()
                if content.nbytes != entry.nbytes:
                    raise UsageError(f"{self.path} changed while {entry.name} was read")
                stream.write(memoryview(content))  # type: ignore[arg-type]
            stream.flush()
            os.fsync(stream.fileno())

    def _read(self, entries: list[_Entry]) -> Iterator[tuple[_Entry, Tensor]]:
        """Yield the tensors in the order of the entries. Reads one saved tensor at a time."""
        source: str | None = None
        parts: dict[str, Tensor] = {}
        for entry in entries:
            if entry.source != source:
                source, parts = entry.source, {}
                saved = self.index["tensors"][_PREFIX + entry.source]
                whole = torch.empty(tuple(saved["shape"]), dtype=entry.dtype)
                chunks = chunks_of(self.path, saved)
                read_shards([(whole, chunks)], checkpoint_format.open_tensors)
                parts = dict(self._converted(entry.source, whole))
            yield entry, parts[entry.name].contiguous()

    def _write_config(self, file: Path) -> None:
        """Set the dtype in config.json to the dtype of the exported weights."""
        config = json.loads(file.read_text())
        dtypes = {str(entry.dtype).removeprefix("torch.") for entry in self.entries}
        if len(dtypes) == 1:
            config.pop("torch_dtype", None)
            config["dtype"] = dtypes.pop()
        _write_text(file, json.dumps(config, indent=2) + "\n")

    def _model_card(self) -> str:
        summary: dict[str, Any] = {}
        if (self.run / "summary.json").is_file():
            summary = json.loads((self.run / "summary.json").read_text())
        figures = [
            ("training steps", self.index["step"]),
            ("layout", summary.get("layout")),
            ("final training loss", summary.get("final_loss")),
            ("test loss", summary.get("test_loss")),
            ("test accuracy", summary.get("test_accuracy")),
        ]
        rows = [f"| {name} | {value} |" for name, value in figures if value is not None]
        recipe = (self.run / "recipe.toml").read_text()
        tomllib.loads(recipe)
        count = sum(math.prod(entry.shape) for entry in self.entries)
        lines = [
            f"# {self.to.absolute().name}",
            "",
            f"{count:,} parameters, trained from `{self.recipe.model}` with tutti.",
            "",
            "| | |",
            "| --- | --- |",
            *rows,
            "",
            "## Recipe",
            "",
            "```toml",
            recipe.strip(),
            "```",
        ]
        return "\n".join(lines) + "\n"


def _complete_checkpoint(directory: Path, step: int | None) -> tuple[Path, Index]:
    steps = checkpoint_format.saved_steps(directory)
    if not steps:
        raise UsageError(f"{directory.parent} has no checkpoint. Wait for the first checkpoint.")
    if step is not None and step not in steps:
        existing = ", ".join(map(str, steps))
        raise UsageError(f"{directory.parent} has no checkpoint of --step {step}. Use {existing}.")
    problem = ""
    for candidate in reversed(steps) if step is None else [step]:
        path = directory / checkpoint_format.step_name(candidate)
        index = verify(path, 0, 1)
        if not isinstance(index, str):
            return path, index
        problem = f"{path.name} is damaged: {index}"
    raise UsageError(f"{directory} has no complete checkpoint: {problem}")


def _divide(entries: list[_Entry], limit: int) -> dict[str, list[_Entry]]:
    """Divide the tensors into files of at most `limit` bytes. A larger tensor gets its own file."""
    groups: list[list[_Entry]] = []
    size = 0
    for entry in entries:
        if not groups or size + entry.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def _save_state_dict(source: Path, entries: list[_Entry], target: Path) -> None:
    """Write a file for torch.load from a safetensors file.

    The safetensors file is memory-mapped, so that the weights need not fit into memory.
    """
    content = np.memmap(source, dtype=np.uint8, mode="c")
    start = 8 + int.from_bytes(bytes(content[:8]), "little")
    tensors = {}
    for entry in entries:
        values = torch.from_numpy(content[start : start + entry.nbytes])
        tensors[entry.name] = values.view(entry.dtype).view(entry.shape)
        start += entry.nbytes
    with target.open("wb") as stream:
        torch.save(tensors, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
