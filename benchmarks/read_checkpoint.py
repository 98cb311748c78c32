"""Memory and time to read a Hugging Face checkpoint in a sharded layout.

    python benchmarks/read_checkpoint.py --gb 4 --ranks 4 --json read_checkpoint_MACHINE_DATE.json

Writes a Llama of `--gb` × 10⁹ bytes in bfloat16 as 8 safetensors files into --folder, unless the
folder exists. Then `--ranks` ranks read it in layout shardN, in turns with the baseline:

    tutti      each rank builds the model on meta, shards it and reads its slices of every tensor
    baseline   the ranks divide the tensors, and each rank copies its tensors with safetensors, so
               that the bytes of the files are read once

A time is the time of the slowest rank, from a barrier until its tensors are filled. The model is
built on meta before the barrier, because the baseline has no model. `fill_s` is the part of
`tutti_s` in which files are read; the rest is sharding and allocation.

Memory is the peak of RssAnon + RssShmem in /proc/self/status, read every 2 ms: the memory that a
rank has for itself. Memory that malloc keeps after a repeat counts. Mapped pages of the files
belong to the page cache, and the kernel can free them. The limit is 1.15 × share + the largest
tensor + an empty rank, which is the same rank before its first read. With --cold, the files are
dropped from the page cache before every read (posix_fadvise); otherwise they were read once before.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

FILES = 8
LARGEST_VOCABULARY = 32_000
TIME_LIMIT, SHARE_LIMIT = 1.2, 1.15


def write_checkpoint(folder: Path, size: int) -> None:
    """Write config.json and the weights of a Llama with about `size` bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden = 2048 if size >= 10**9 else 512
    layer = 2 * (4 * hidden * hidden + 3 * hidden * 4 * hidden)  # bytes of a block in bfloat16
    vocabulary = min(LARGEST_VOCABULARY, size // (16 * hidden))
    layers = max(1, round((size - 4 * vocabulary * hidden) / layer))
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    named = list(model.state_dict().items())
    folder.mkdir(parents=True)
    weight_map, total = {}, sum(tensor.nbytes for _, tensor in named)
    groups: list[list[tuple[str, Any]]] = [[] for _ in range(FILES)]
    done = 0
    for name, tensor in named:
        groups[min(FILES - 1, done * FILES // total)].append((name, tensor))
        done += tensor.nbytes
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{FILES:05d}.safetensors"
        tensors = {name: torch.randn(t.shape, dtype=t.dtype) for name, t in group}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)


class PeakMemory:
    """Reads the memory of this process in a thread, and keeps the peak in bytes."""

    def __enter__(self) -> "PeakMemory":
        self.peak, self._stop = self.now(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self.now())

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, self.now())

    @staticmethod
    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = {line.partition(":")[0]: line.split() for line in lines}
        return 1024 * (int(fields["RssAnon"][1]) + int(fields["RssShmem"][1]))


def drop_from_page_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_rank(folder: str, repeats: int, cold: bool) -> list[dict[str, Any]]:
    """Read the checkpoint `repeats` times in both ways. Runs on every rank."""
    import gc

    import torch
    from safetensors import safe_open

    import tutti
    from tutti.comm import barrier
    from tutti.models.pretrained import saved_tensors
    from tutti.parallel import EngineOptions, build_engine
    from tutti.parallel.layout import ParallelOptions
    from tutti.train.init import build_meta_model
    from tutti.train.recipe import RECIPES, with_values

    rows = []
    with tutti.init(device="cpu") as world:
        layout = f"shard{world.size}"
        changes = {"model": f"hf:{folder}", "parallel": {"layout": layout}}
        recipe = with_values(RECIPES["hf"], changes)
        tensors = list(saved_tensors(Path(folder)).values())
        mine = tensors[world.rank :: world.size]

        def begin() -> None:
            gc.collect()
            if cold and world.rank == 0:
                drop_from_page_cache(Path(folder))
            barrier()

        def read_with_tutti() -> dict[str, float]:
            model, weights, _ = build_meta_model(recipe, None)
            fill, fill_s = weights.fill, [0.0]

            def timed_fill(*arguments: Any) -> None:
                start = time.perf_counter()
                fill(*arguments)
                fill_s[0] = time.perf_counter() - start

            weights.fill = timed_fill  # type: ignore[method-assign]
            begin()
            with PeakMemory() as memory:
                start = time.perf_counter()
                engine = build_engine(
                    model, world, EngineOptions(), ParallelOptions(layout=layout), weights=weights
                )
                seconds = time.perf_counter() - start
            shards = [parameter.to_local() for parameter in engine.model.parameters()]
            share = sum(shard.nbytes for shard in shards)
            checked = _check(engine.model, folder)
            return {
                "tutti_s": seconds,
                "fill_s": fill_s[0],
                "peak": memory.peak,
                "empty": empty,
                "share": share,
                "equal": checked,
            }

        def read_with_safetensors() -> float:
            begin()
            start = time.perf_counter()
            copies = []
            for tensor in mine:
                with safe_open(tensor.file, framework="pt") as file:
                    copies.append(file.get_tensor(tensor.key).clone())
            return time.perf_counter() - start

        build_meta_model(recipe, None)  # imports and caches belong to an empty rank
        gc.collect()
        empty = PeakMemory.now()
        for number in range(repeats + 1):  # the first repeat fills the page cache
            if number % 2:
                baseline, row = read_with_safetensors(), read_with_tutti()
            else:
                row = read_with_tutti()
                baseline = read_with_safetensors()
            if number:
                rows.append(row | {"baseline_s": baseline})
        largest = max(torch.Size(t.shape).numel() for t in tensors) * 2
    return [row | {"largest": largest} for row in rows]


def _check(model: Any, folder: str) -> bool:
    """Return whether this rank's shard of the first large matrix has the bytes of the file."""
    from safetensors import safe_open
    from torch import equal

    from tutti.models.pretrained import saved_tensors
    from tutti.parallel.mesh import shard_and_box

    name, parameter = next((n, p) for n, p in model.named_parameters() if "q_proj" in n)
    local, box = shard_and_box(parameter)
    saved = saved_tensors(Path(folder))[name]
    with safe_open(saved.file, framework="pt") as file:
        first, size = box.offsets[0], box.sizes[0]
        return bool(equal(local, file.get_slice(saved.key)[first : first + size]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gb", type=float, default=4.0, help="size of the weights in 10⁹ bytes")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache")
    parser.add_argument("--folder", type=Path, help="keep the checkpoint in this folder")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()

    import tutti
    from tutti.machine.environment import describe_environment

    with tempfile.TemporaryDirectory() as temporary:
        folder = flags.folder or Path(temporary) / "model"
        if not folder.exists():
            write_checkpoint(folder, int(flags.gb * 1e9))
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        arguments = (str(folder.absolute()), flags.repeats, flags.cold)
        ranks = tutti.spawn(measure_rank, arguments, ranks=flags.ranks, device="cpu", show="none")
    repeats = list(zip(*ranks, strict=True))
    times = {
        key: [max(row[key] for row in repeat) for repeat in repeats]
        for key in ("tutti_s", "fill_s", "baseline_s")
    }
    ratios = [a / b for a, b in zip(times["tutti_s"], times["baseline_s"], strict=True)]
    worst = [max(rows, key=lambda row: row["peak"]) for rows in ranks]
    limits = [SHARE_LIMIT * row["share"] + row["largest"] + row["empty"] for row in worst]
    result = {
        "schema": "tutti.read_checkpoint/1",
        "command": ["python", *sys.argv],
        "environment": describe_environment(),
        "bytes": size,
        "layout": f"shard{flags.ranks}",
        "page_cache": "cold: dropped before every read" if flags.cold else "warm",
        "repeats": times | {"ratio": ratios},
        "time_ratio": median(ratios),
        "time_limit": TIME_LIMIT,
        "ranks": [row | {"limit": limit} for row, limit in zip(worst, limits, strict=True)],
        "equal": all(row["equal"] for rows in ranks for row in rows),
        "memory_ok": all(row["peak"] <= limit for row, limit in zip(worst, limits, strict=True)),
        "time_ok": median(ratios) <= TIME_LIMIT,
    }
    print(f"{size / 1e9:.2f} GB in shard{flags.ranks}, page cache {result['page_cache']}")
    for rank, (row, limit) in enumerate(zip(worst, limits, strict=True)):
        print(
            f"rank {rank}: peak {row['peak'] / 1e6:,.0f} MB, limit {limit / 1e6:,.0f} MB "
            f"(share {row['share'] / 1e6:,.0f}, largest tensor {row['largest'] / 1e6:,.0f}, empty "
            f"{row['empty'] / 1e6:,.0f})"
        )
    seconds = {key: median(values) for key, values in times.items()}
    print(
        f"tutti {seconds['tutti_s']:.2f} s, of which reading {seconds['fill_s']:.2f} s; "
        f"safetensors {seconds['baseline_s']:.2f} s; ratio {result['time_ratio']:.2f} (limit "
        f"{TIME_LIMIT})"
    )
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=1))
    return 0 if result["memory_ok"] and result["time_ok"] and result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
