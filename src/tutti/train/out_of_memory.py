"""Explains why a rank is out of memory.

The explanation names the operation that requested memory, the memory in use by cause (see
memory.py), and changes of flags with which the step would fit into memory. The saving of a change
is computed from the measured memory of each cause. If the rank failed before the end of the first
forward pass, activations are extrapolated from the modules that have run.
"""

import linecache
import re
import resource
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import torch
from torch import nn

import tutti
from tutti.measure.units import format_bytes
from tutti.parallel.layout import Layout, layout_of
from tutti.parallel.recompute import repeated_blocks
from tutti.train.memory import (
    MemoryByCause,
    Split,
    resident_bytes,
    status_bytes,
    trained_bytes,
)
from tutti.train.recipe import Recipe
from tutti.train.recipe_check import check_recipe
from tutti.train.training_schedule import TrainingSchedule
from tutti.world.errors import OutOfMemory, UsageError
from tutti.world.world import World

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|std::bad_alloc|ALLOC_FAILED",
    re.IGNORECASE,
)
_ASKED = re.compile(
    r"(?:tried to allocate|unable to allocate) ([\d.]+) ?(bytes|B|[KMGT]iB)", re.IGNORECASE
)
_UNITS = {"bytes": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_TORCH, _TUTTI = Path(torch.__file__).parent, Path(tutti.__file__).parent
# Code in these directories is treated like the code of a user's model or dataset.
_MODEL_CODE = (_TUTTI / "models", _TUTTI / "data")
_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_MAX_HALVINGS = 6
# Estimated bytes that the first step allocates after the forward pass: libraries, kernel
# workspaces, threads.
_LATER_BYTES = 32 << 20
# If fewer bytes are free, a thread cannot start (its stack has 8 MiB).
_THREAD_BYTES = 16 << 20


_CREATION, _FORWARD, _BACKWARD = "while the model was created", "in forward", "in backward"
_OPTIMIZER = "in the optimizer step"
# Maps a function of tutti to the phase of the run in which it is called.
_PHASES = {
    "loop._load_dataset": "while the dataset was loaded",
    "loop._build": _CREATION,
    "loop._loaders": "while the data loader was created",
    "loop._resume": "while a checkpoint was loaded",
    "engine.run": _FORWARD,
    "executor.run": _FORWARD,
    "loop._evaluate": "in an evaluation",
    "loop._save": "while a checkpoint was saved",
}


@dataclass(frozen=True)
class Place:
    """The operation that requested memory, and where it was called."""

    phase: str
    operation: str | None = None
    """The function that was called, such as F.linear."""
    file: str | None = None
    line: int | None = None
    text: str | None = None
    """The source line."""
    module: str | None = None

    def __str__(self) -> str:
        words = [f"by {self.operation}"] if self.operation else []
        words.append(self.phase)
        if self.module:
            words.append(f"of module {self.module}")
        if self.file:
            words.append(f"at {self.file}:{self.line}")
        return " ".join(words) + (f" ({self.text})" if self.text else "")


@dataclass(frozen=True)
class Change:
    """A change of the command line, and the memory that it would save on this rank."""

    flags: str
    saves: int
    fits: bool


class Explainer:
    """Raises OutOfMemory, with an explanation, instead of torch's or Python's own error."""

    def __init__(self, world: World, recipe: Recipe, memory: MemoryByCause) -> None:
        self.world, self.recipe, self.memory = world, recipe, memory
        self.schedule: TrainingSchedule | None = None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """In the `with` block, replace an out-of-memory error by OutOfMemory."""
        explanation = None
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            explanation = self._explain(error)
            traceback.clear_frames(error.__traceback__)  # frees the tensors of the failed step
        if explanation is not None:
            raise explanation

    def _explain(self, error: Exception) -> OutOfMemory:
        memory = self.memory
        counter = memory.counter
        in_use, free = memory_in_use(memory.device)
        now = memory.now()
        asked = asked_bytes(error)
        place = find_place(error)
        if place.phase == _BACKWARD and counter and not memory.step_complete:
            place = replace(place, module=counter.last_unpacked or None)
        reserved_unused = 0
        if memory.device.type == "cuda":
            reserved_unused = in_use - torch.cuda.memory_allocated(memory.device)
        parts: dict[str, int] = {**now._asdict(), "fragmentation": reserved_unused}
        parts["other"] = max(0, in_use - sum(parts.values()))
        needs = Needs.of(self, now, in_use, place.phase, asked or 0)
        shortage = 0 if asked is None else asked - free
        known = memory.model is not None
        changes = self._changes(needs, in_use + free, shortage) if known else []
        size = "memory" if asked is None else format_bytes(asked)
        first = f"out of memory: {size} requested {place}"
        lines = [first, *_describe(parts, in_use, free)]
        if known:
            lines += [*needs.describe(), *_advise(changes)]
        else:
            lines.append("  the size of the model is not known yet. Free memory on this host.")
        report = {
            "rank": self.world.rank,
            "reason": first,
            "asked": asked,
            "phase": place.phase,
            "operation": place.operation,
            "file": place.file,
            "line": place.line,
            "module": place.module,
            "memory": {**parts, "total": in_use},
            "available": in_use + free,
            "needed": needs.total if known else None,
            "estimated": needs.estimated or None,
            "changes": [vars(change) for change in changes],
            "message": str(error).partition("\n")[0],
        }
        return OutOfMemory("\n".join(lines), report)

    def _changes(self, needs: "Needs", available: int, shortage: int) -> list[Change]:
        """Return the changes with which the step would fit into memory, cheapest first.

        Combinations of two changes are tried only if no single change is enough, and combinations
        of three only if no combination of two is enough. If none is enough, return the change or
        combination with the largest saving.
        """
        tried: list[Change] = []
        for number in (1, 2, 3):
            for kinds in combinations(("recompute", "batch", "shard"), number):
                for halvings in range(1, _MAX_HALVINGS + 1) if "batch" in kinds else (0,):
                    found = self._change(needs, "recompute" in kinds, halvings, "shard" in kinds)
                    if found is None:
                        break
                    flags, total = found
                    saves = needs.total - total
                    fits = total <= available and saves >= max(1, shortage)
                    tried.append(Change(flags, saves, fits))
                    if fits:
                        break
            if fitting := [change for change in tried if change.fits]:
                return fitting
        useful = [change for change in tried if change.saves >= max(1, shortage)]
        return sorted(useful, key=lambda change: -change.saves)[:1]

    def _change(
        self, needs: "Needs", recompute: bool, halvings: int, shard: bool
    ) -> tuple[str, int] | None:
        """Return the flags of a change, and the bytes that a step needs with these flags.

        Return None if the change is impossible. `halvings` is how often the number of samples per
        microbatch is halved and the number of microbatches is doubled.
        """
        recipe, flags = self.recipe, []
        if recompute:
            possible = needs.blocks and recipe.compute.checkpoint_activations != "full"
            if not possible or not needs.activations:
                return None
            compute = replace(recipe.compute, checkpoint_activations="full")
            recipe = replace(recipe, compute=compute)
            needs = replace(needs, activations=min(needs.activations, needs.recomputed))
            flags.append("--checkpoint-activations full")
        if halvings:
            schedule, factor = self.schedule, 2**halvings
            if schedule is None or schedule.rank_batch % factor or not needs.activations:
                return None
            batch, accumulation = schedule.rank_batch // factor, schedule.accumulation * factor
            batching = replace(recipe.batching, accumulation=accumulation)
            if batching.global_batch is None:
                batching = replace(batching, batch=batch)
                flags.append(f"--batch {batch}")
            recipe = replace(recipe, batching=batching)
            needs = replace(needs, activations=needs.activations // factor)
            flags.append(f"--accumulation {accumulation}")
        if shard:
            layout = layout_of(recipe.parallel.layout, self.world.size)
            parts = layout.dp
            if layout.size == 1:
                if self.world.device.type == "cuda" and torch.cuda.device_count() == 1:
                    return None
                parts = 2
                flags.append("--ranks 2")
            if parts == 1:
                return None
            new = replace(layout, dp=1, shard=parts * layout.shard)
            recipe = replace(recipe, parallel=replace(recipe.parallel, layout=str(new)))
            gathered = needs.buffers
            if layout.shard == 1:
                # FSDP keeps the full parameters and gradients of modules outside of blocks. For
                # the current block, it keeps full parameters, full gradients and the all-gather
                # buffer. For each prefetched block, it also keeps the full parameters.
                gathered = 2 * needs.outside_blocks
                gathered += (3 + recipe.parallel.prefetch) * needs.largest_block
            needs = replace(
                needs,
                parameters=needs.parameters // parts,
                gradients=needs.gradients // parts,
                optimizer=needs.optimizer // parts,
                buffers=gathered,
            )
            flags.append(f"--layout {new}")
        return (" ".join(flags), needs.total) if self._is_allowed(recipe) else None

    def _is_allowed(self, recipe: Recipe) -> bool:
        """Return whether the recipe check accepts the changed recipe."""
        layout = recipe.parallel.layout
        size = self.world.size if layout is None else Layout.parse(layout).size
        try:
            check_recipe(recipe, size, self.world.device.type)
        except UsageError:
            return False
        return True


@dataclass(frozen=True)
class Needs:
    """The bytes that a whole step needs on this rank, measured or estimated."""

    fixed: int
    """All memory that is not in one of the next five fields."""
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    recomputed: int
    """The bytes of activations with full recomputation: activations outside of blocks, the inputs
    of all blocks, and the activations of one block."""
    blocks: int
    """Number of repeated blocks, such as transformer layers. The activations of a block can be
    recomputed, and FSDP gathers one block at a time."""
    largest_block: int
    """Bytes of the parameters of the largest block."""
    outside_blocks: int
    """Bytes of the parameters outside of blocks."""
    estimated: str
    """Why activations are estimated or not included, or "" if they were measured."""

    @property
    def total(self) -> int:
        parts = (self.parameters, self.gradients, self.optimizer, self.activations, self.buffers)
        return self.fixed + sum(parts)

    @classmethod
    def of(cls, explainer: Explainer, now: Split, in_use: int, phase: str, asked: int) -> "Needs":
        memory, recipe = explainer.memory, explainer.recipe
        model, counter = memory.model, memory.counter
        blocks = [] if model is None else repeated_blocks(model)
        parameters, trained = now.parameters, trained_bytes(model)
        if memory.engine is None and model is not None:
            # Not all parameters are allocated yet, so compute their size from the whole model.
            whole = sum(parameter.nbytes for parameter in model.parameters())
            layout = layout_of(recipe.parallel.layout, explainer.world.size)
            divisor = layout.shard * layout.tp * layout.pp
            parameters, trained = max(parameters, whole // divisor), trained // divisor
        tensors = 2  # optimizer state tensors per parameter: 2 for AdamW, fewer for most others
        if recipe.optimization.optimizer == "sgd":
            tensors = 1 if recipe.optimization.momentum else 0
        tensors += recipe.optimization.ema is not None
        gradients, optimizer = max(now.gradients, trained), max(now.optimizer, tensors * trained)
        activations, recomputed, estimated = 0, 0, ""
        peak = 0  # peak bytes of activations, which the process may still hold as free memory
        if counter is None:
            estimated = "activations are not included: they are not known yet"
            if not memory.counts_activations:
                estimated = "activations are not included: --compile and --cuda-graph hide them"
        else:
            modules: dict[str, int] = dict(counter.peak_modules)
            scale = 1.0
            if phase == _FORWARD and not memory.step_complete:
                modules = {name: size for name, size in counter.by_module.items() if size}
                scale = _extrapolation_factor(counter.model, counter.entered)
                estimated = "an estimate: forward had not ended, so its activations are "
                estimated += f"extrapolated from the {100 / scale:.0f} % of modules that had run"
            peak = sum(modules.values())
            activations = int(scale * peak)
            names = [name for name, module in _named(counter.model) if module in blocks]
            per_block = [_inside(modules, name) for name in names]
            in_blocks = sum(per_block)
            largest = max(per_block, default=0)
            inputs = max(counter.block_inputs.values(), default=0) * len(names)
            recomputed = int(scale * (peak - in_blocks)) + inputs
            recomputed += int(max(largest, scale * in_blocks / max(1, len(names))))
        sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
        tracked = sum(now) - now.activations + peak
        fixed = max(in_use - tracked, memory.before_model if memory.device.type == "cpu" else 0)
        if not memory.step_complete:
            # Assume that backward needs temporary tensors of about the requested size.
            fixed += _LATER_BYTES + asked
        return cls(
            fixed,
            parameters,
            gradients,
            optimizer,
            activations,
            now.buffers,
            recomputed,
            len(blocks),
            max(sizes, default=0),
            max(0, parameters - sum(sizes)),
            estimated,
        )

    def describe(self) -> list[str]:
        note = f" ({self.estimated})" if self.estimated else ""
        return [f"  a whole step needs {format_bytes(self.total)}{note}"]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that memory could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        # Either the stack of the thread could not be allocated, or there are too many threads.
        return memory_in_use(torch.device("cpu"))[1] < _THREAD_BYTES
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def asked_bytes(error: BaseException) -> int | None:
    """Return the number of requested bytes, or None if the error message does not contain it."""
    found = _ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2].lower()])


def find_place(error: BaseException) -> Place:
    """Return the innermost source line outside of torch and tutti that requested memory.

    If there is no such line, return the innermost Python line. Most operations of the backward pass
    run in C++ and have no Python line.
    """
    frames = traceback.extract_tb(error.__traceback__)
    files = [Path(frame.filename) for frame in frames]
    functions = [f"{file.stem}.{frame.name}" for file, frame in zip(files, frames, strict=True)]
    phases = [_PHASES[name] for name in functions if name in _PHASES]
    phase = phases[-1] if phases else "in a step"
    if any(_TORCH / "optim" in file.parents for file in files):
        phase = _OPTIMIZER
    names = [frame.name for frame in frames]
    if "_engine_run_backward" in names:
        # Python frames inside of the backward pass belong to a recomputed forward pass, or to the
        # backward method of a torch.autograd.Function.
        phase = _BACKWARD
        frames = traceback.StackSummary(frames[names.index("_engine_run_backward") + 1 :])
    if not frames:
        return Place(phase)
    at = next((frame for frame in reversed(frames) if _is_own(frame)), frames[-1])
    return Place(phase, _function(frames[-1]), _short(at.filename), at.lineno, at.line)


def _is_own(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame belongs to the code of a model or dataset.

    Frames of torch, of the rest of tutti and of the standard library do not.
    """
    folders = Path(frame.filename).parents
    if _TUTTI in folders:
        return any(folder in folders for folder in _MODEL_CODE)
    standard = _STANDARD_LIBRARY in folders and "site-packages" not in frame.filename
    return not (standard or _TORCH in folders or frame.filename.startswith("<"))


def _short(file: str) -> str:
    """Return the path relative to the current directory, or to the parent of torch or tutti."""
    for folder in (Path.cwd(), _TORCH.parent, _TUTTI.parent):
        if folder in Path(file).parents:
            return str(Path(file).relative_to(folder))
    return file


def _function(frame: traceback.FrameSummary) -> str | None:
    """Return the function that a line calls, such as F.linear."""
    text = frame.line or ""
    with suppress(AttributeError, TypeError):
        if frame.lineno == frame.end_lineno:
            line = linecache.getline(frame.filename, frame.lineno or 0).encode()
            text = line[frame.colno : frame.end_colno].decode()
    name = re.search(r"[\w.]+(?=\()", text)
    return name[0] if name else text.strip() or None


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Return the bytes that this rank uses on its device, and the bytes that it can allocate."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
        return reserved, max(0, min(free, allowed - reserved))
    limits = [_available_on_host()]
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft - status_bytes(used))
    return resident_bytes(), max(0, min(limits))


def _available_on_host() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0


def _describe(parts: dict[str, int], in_use: int, free: int) -> list[str]:
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return [f"  in use: {shown}; {format_bytes(in_use)} of {format_bytes(in_use + free)}"]


def _advise(changes: list[Change]) -> list[str]:
    if not changes:
        return ["  no change of flags is enough. Use more ranks with shard, tp or pp."]
    width = max(len(change.flags) for change in changes)
    rows = [f"  {change.flags:<{width}}  saves {format_bytes(change.saves)}" for change in changes]
    if not changes[0].fits:
        return ["  no change of flags is enough. The largest saving:", *rows]
    return ["  would fit:" if len(rows) == 1 else "  each of these would fit:", *rows]


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        yield name or type(module).__name__, module


def _inside(modules: dict[str, int], block: str) -> int:
    """Return the bytes of activations of a block, including the modules in it."""
    return sum(
        size for name, size in modules.items() if name == block or name.startswith(f"{block}.")
    )


def _extrapolation_factor(model: nn.Module, entered: set[str]) -> float:
    """Return (number of layers) / (number of layers whose forward has begun)."""
    layers = [name for name, module in _named(model) if next(module.children(), None) is None]
    return len(layers) / max(1, len(entered.intersection(layers)))
