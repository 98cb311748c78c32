"""Exports the weights of a checkpoint for other programs, one tensor at a time.

    model.safetensors                 the weights; more than 5 GB are divided into several files
    model.safetensors.index.json      the file of each tensor, if there are several files
    config.json, tokenizer.json, …    format hf: copied from the model's folder
    model.pt                          format state_dict: instead of safetensors, for torch.load
    adapter_model.safetensors         format adapter: the LoRA matrices of a run with --lora, with
    adapter_config.json               their configuration, for PeftModel.from_pretrained
    README.md                         a model card with the recipe and the figures of the run

The other formats contain the LoRA matrices of a run merged into the weights: W + scale · B A.

The folder is written under a temporary name and renamed when all files are complete.
"""

import json
import math
import os
import shutil
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tutti.measure.units import format_bytes
from tutti.models.config import ModelError
from tutti.models.lora_layers import (
    ADAPTER_WEIGHTS,
    MATRICES,
    LoraOptions,
    is_transposed_linear,
    peft_config,
    saved_name,
)
from tutti.models.pretrained import (
    build_causal_lm,
    copy_side_files,
    read_folder,
    saved_form,
    tied_names,
)
from tutti.parallel.materialize import build_with_buffers, read_shards
from tutti.train.checkpoint import format as checkpoint_format
from tutti.train.checkpoint.format import DTYPE_NAMES, DTYPES, Index
from tutti.train.checkpoint.load import chunks_of, verify
from tutti.train.run_directory import Format, check_export, checkpoint_step
from tutti.world.errors import UsageError

_MAX_FILE_BYTES = 5_000_000_000
_PREFIX = "model."  # begins the name of every model tensor in a checkpoint
_EMA_PREFIX = "ema."  # begins the name of the moving average of a parameter


@dataclass(frozen=True)
class _Entry:
    """A tensor of the exported folder."""

    name: str
    source: str  # name of the tensor in the model, without the parts that --lora adds
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Export:
    """The export of one checkpoint. The constructor checks the arguments, `write` writes files."""

    def __init__(
        self, run: Path, checkpoint: str, to: Path, kind: Format | None, ema: bool | None = None
    ) -> None:
        """`checkpoint` and `ema` are the flags of tutti export."""
        self.run, self.to = run, to
        self.recipe, self.kind = check_export(run, checkpoint, to, kind, ema)
        step = checkpoint_step(run, checkpoint)
        self.path, self.index = _complete_checkpoint(run / "checkpoints", step)
        averages = {name for name in self.index["tensors"] if name.startswith(_EMA_PREFIX)}
        if ema and not averages:
            raise UsageError(f"--ema: {run} was trained without --ema. Omit --ema.")
        self.ema = bool(averages) if ema is None else ema
        is_hf = self.recipe.model.startswith("hf:")
        self.lora = None if self.recipe.lora is None else LoraOptions.parse(self.recipe.lora)
        self.side_files = run / "model"
        if is_hf and not self.side_files.is_dir():
            self.side_files = Path(self.recipe.model.partition(":")[2])
        saved = {
            name.removeprefix(_PREFIX): (DTYPES[each["dtype"]], tuple(each["shape"]))
            for name, each in self.index["tensors"].items()
            if name.startswith(_PREFIX)
        }
        self._base = self._base_model() if is_hf and (self.kind == "hf" or self.lora) else None
        ends = {matrix: f".{matrix}.default.weight" for matrix in MATRICES}
        self._adapted = [
            name.removesuffix(ends["lora_A"])
            for name in saved
            if self.lora is not None and name.endswith(ends["lora_A"])
        ]
        matrices = {
            saved_name(layer, matrix): f"{layer}{ends[matrix]}"
            for layer in self._adapted
            for matrix in MATRICES
        }
        self._sources = matrices
        """Maps the name of a tensor, without the parts that --lora adds, to its saved name."""
        self._untied: dict[str, str] = {}
        if self.kind != "adapter":
            rest = saved.keys() - matrices.values()
            self._sources = {
                _base_name(name, self._adapted): name for name in saved if name in rest
            }
            self._untied = self._untie()
            self._sources |= self._untied
        tensors = {name: saved[source] for name, source in self._sources.items()}
        self._convert: Callable[[str, Tensor], Mapping[str, Tensor]] | None = None
        if self.kind == "hf":
            assert self._base is not None
            self._convert = saved_form(
                self._base, {name: each[1] for name, each in tensors.items()}
            )
        self.entries = [
            _Entry(new_name, name, dtype, tuple(converted.shape))
            for name, (dtype, shape) in tensors.items()
            for new_name, converted in self._converted(
                name, torch.empty(shape, dtype=dtype, device="meta")
            )
        ]
        self._check_free_space()

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def _base_model(self) -> nn.Module:
        """Return the Hugging Face model of the run on the meta device, without adapters."""
        try:
            folder = read_folder(self.side_files, weights=False)
            return build_with_buffers(lambda: build_causal_lm(folder))
        except ModelError as error:
            raise UsageError(f"--run {self.run}: {error}") from None

    def _untie(self) -> dict[str, str]:
        """Return {adapted weight: its name in the checkpoint} for adapted weights that are tied.

        An output layer may be tied to the embedding, so the checkpoint contains their weight once.
        The merge changes only the weight of the output layer, which is then exported separately.
        """
        untied = {}
        for layer in self._adapted:
            name = f"{layer}.weight"
            if name in self._sources:
                continue
            ties = [] if self._base is None else tied_names(self._base).values()
            first = next(
                (n for tie in ties if name in tie for n in tie if n in self._sources), None
            )
            if first is None:
                raise UsageError(
                    f"{layer} shares its weight with another layer, so its adapter cannot be "
                    "merged. Use --format adapter."
                )
            untied[name] = self._sources[first]
        return untied

    def _converted(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        if self._convert is None:
            return [(name, tensor)]
        return [*self._convert(name, tensor).items()]

    def _check_free_space(self) -> None:
        to = self.to
        existing = next(p for p in (to, *to.absolute().parents) if p.exists())
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
        whole = self.kind in ("state_dict", "adapter")
        files = _divide(self.entries, 1 << 62 if whole else _MAX_FILE_BYTES)
        if self.kind == "adapter":
            files = {ADAPTER_WEIGHTS: self.entries}
            self._adapter_config().save_pretrained(folder)
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
                whole = self._read_saved(self._sources[entry.source])
                layer = entry.source.removesuffix(".weight")
                if layer in self._adapted and self.kind != "adapter":
                    self._merge(layer, whole)
                parts = dict(self._converted(entry.source, whole))
            yield entry, parts[entry.name].contiguous()

    def _read_saved(self, name: str) -> Tensor:
        """Return a whole tensor of the checkpoint."""
        saved = self.index["tensors"][_PREFIX + name]
        # The average of a float16 or bfloat16 parameter is float32 in the checkpoint.
        whole = torch.empty(tuple(saved["shape"]), dtype=DTYPES[saved["dtype"]])
        if self.ema:  # frozen parameters and buffers have no average
            saved = self.index["tensors"].get(_EMA_PREFIX + name, saved)
        read_shards([(whole, chunks_of(self.path, saved))], checkpoint_format.open_tensors)
        return whole

    def _merge(self, layer: str, weight: Tensor) -> None:
        """Add the LoRA matrices of a layer to its weight, with the operations of peft."""
        assert self.lora is not None
        a, b = (self._read_saved(f"{layer}.{matrix}.default.weight") for matrix in MATRICES)
        delta = b @ a
        weight += (delta.T if self._is_transposed(layer) else delta) * (
            self.lora.alpha / self.lora.rank
        )

    def _is_transposed(self, layer: str) -> bool:
        """Return whether a layer is a Conv1D, whose weight is (inputs, outputs)."""
        if self._base is not None:
            return is_transposed_linear(self._base.get_submodule(layer))
        saved = {name.removeprefix(_PREFIX): each for name, each in self.index["tensors"].items()}
        a, b = (saved[f"{layer}.{matrix}.default.weight"]["shape"] for matrix in MATRICES)
        weight = saved.get(f"{layer}.base_layer.weight", {"shape": [b[0], a[1]]})["shape"]
        return [*weight] != [b[0], a[1]]

    def _adapter_config(self) -> Any:
        assert self.lora is not None
        names = [name for name in self.index["tensors"] if name.startswith(_PREFIX)]
        names = [_base_name(name.removeprefix(_PREFIX), self._adapted) for name in names]
        modules = {name.rpartition(".")[0] for name in names}
        config = peft_config(
            self.lora,
            self._adapted,
            [name for name in modules if name not in self._adapted and "lora_" not in name],
            transposed=any(self._is_transposed(layer) for layer in self._adapted),
            causal_lm=self._base is not None,
        )
        config.inference_mode = True
        if self._base is not None:
            config.base_model_name_or_path = self.recipe.model.partition(":")[2]
        return config

    def _write_config(self, file: Path) -> None:
        """Set the dtype in config.json to the dtype of the exported weights."""
        config = json.loads(file.read_text())
        if self._untied:
            config["tie_word_embeddings"] = False
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
            ("weights", "moving average (EMA)" if self.ema else None),
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
    problem = ""
    for candidate in reversed(steps) if step is None else [step]:
        path = directory / checkpoint_format.step_name(candidate)
        index = verify(path, 0, 1)
        if not isinstance(index, str):
            return path, index
        problem = f"{path.name} is damaged: {index}"
    raise UsageError(f"{directory} has no complete checkpoint: {problem}")


def _base_name(name: str, adapted: Collection[str]) -> str:
    """Convert the name of a tensor in a model with adapters to its name in the base model."""
    layer, part, key = name.rpartition(".base_layer.")
    return f"{layer}.{key}" if part and layer in adapted else name


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
