"""Peak memory of every rank during start and training steps of a GPT, compared with a bound.

    python benchmarks/training_memory.py --json benchmarks/cpu_training_memory_HOST_DATE.json
    python benchmarks/training_memory.py --device cuda --ranks-per-gpu 8 --ranks 8 \\
        --layouts shard8 --layers 24 --dim 4096 --heads 32 --precision bf16 \\
        --json benchmarks/gpu_training_memory_DEVICE_DATE.json

Every layout trains in its own world, with the ordinary Trainer. A rank first trains a tiny GPT in
the same layout. The memory that it uses afterwards is the memory of an empty rank. Then the rank
trains the large GPT, and its peak memory is recorded until the last step. On the CPU, this is the
unique set size (private pages, sampled every 20 ms from /proc/self/smaps_rollup). On a GPU, it is
the bytes that torch has allocated, and the unique set size on the host is recorded, too. The bound
of a rank, in bytes, is

    1.15 × (parameters, gradients and AdamW state) / ranks + one layer + activations + empty rank

where activations are the tensors that autograd keeps for all layers of one microbatch. They are
computed from the tensors of one block.
"""

import argparse
import gc
import json
import resource
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tutti
from tutti.machine.environment import describe_environment
from tutti.models.config import GPTConfig
from tutti.models.gpt import GPT
from tutti.train.loop import Trainer
from tutti.train.recipe import RECIPES, Recipe
from tutti.train.run_directory import RunDirectory
from tutti.world.exchange import gather_json
from tutti.world.launch import LocalWorld

_BYTES_PER_PARAMETER = 16  # float32 parameter, gradient and AdamW's two moments
_SLACK = 1.15
_SAMPLE_SECONDS = 0.02


def unique_set_size() -> int:
    """Return the private bytes of this process, in memory or swapped out."""
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists():  # kernels without it (gVisor): resident minus shared pages
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
        return (int(resident) - int(shared)) * resource.getpagesize()
    total = 0
    for line in rollup.read_text().splitlines():
        if line.startswith(("Private_Clean", "Private_Dirty", "Private_Hugetlb", "Swap:")):
            total += int(line.split()[1]) * 1024
    return total


class PeakSampler:
    """Records the largest unique set size inside the `with` block."""

    def __init__(self) -> None:
        self.peak = unique_set_size()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakSampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.peak = max(self.peak, unique_set_size())


def recipe_of(options: argparse.Namespace, layout: str, config: GPTConfig, steps: int) -> Recipe:
    """Return the recipe `gpt` with this architecture, on synthetic text, without evaluation."""
    recipe = RECIPES["gpt"]
    return replace(
        recipe,
        architecture=config,
        data=replace(recipe.data, dataset="synthetic", seq_len=options.seq_len),
        batching=replace(recipe.batching, batch=options.batch),
        compute=replace(recipe.compute, precision=options.precision),
        parallel=replace(recipe.parallel, layout=layout),
        length=replace(recipe.length, steps=steps, evaluate=False),
    )


def train(world: tutti.World, recipe: Recipe) -> float:
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(gather_json(folder)[0]))
        if world.is_first:
            directory.create()
        gather_json(None)  # the directory exists
        loss = float(Trainer(world, recipe, directory, save=False).run().summary["final_loss"])
        gather_json(None)  # all ranks have closed their files
    gc.collect()
    return loss


def activation_bytes(config: GPTConfig, batch: int, seq_len: int, precision: str) -> int:
    """Return the bytes that autograd keeps for all layers of one microbatch.

    The tensors of one block are counted on the meta device and multiplied by the number of layers.
    """
    kept: dict[int, int] = {}
    with torch.device("meta"):
        model = GPT(replace(config, layers=1))
        weights = {each.untyped_storage()._cdata for each in model.parameters()}
        keep: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            keep.append(tensor)
            storage = tensor.untyped_storage()._cdata
            if storage not in weights:
                kept[storage] = tensor.untyped_storage().nbytes()
            return tensor

        x = torch.zeros(batch, seq_len, config.dim, requires_grad=True)
        block = next(iter(model.blocks.values()))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x, model.rotary)
    logits = 3 * 4 * batch * seq_len * config.vocab_size
    del precision  # counted in float32: an upper bound for bf16
    return config.layers * sum(kept.values()) + logits


def run_rank(options: argparse.Namespace) -> None:
    """Measure as one rank of one layout. Rank 0 writes the row."""
    layout = options.rank_of_layout
    config = GPTConfig(
        vocab_size=options.vocab_size,
        max_seq_len=options.seq_len,
        layers=options.layers,
        dim=options.dim,
        heads=options.heads,
    )
    tiny = replace(config, layers=max(4, options.ranks), dim=32 * options.heads)
    shared = options.ranks_per_gpu if options.ranks_per_gpu > 1 else None
    with tutti.init(device=options.device, ranks_per_gpu=shared) as world:
        train(world, recipe_of(options, layout, tiny, 1))
        cuda = world.device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)
        empty_host = unique_set_size()
        empty_device = torch.cuda.memory_allocated(world.device) if cuda else 0
        with PeakSampler() as sampler:
            loss = train(world, recipe_of(options, layout, config, options.steps))
        device_peak = torch.cuda.max_memory_allocated(world.device) if cuda else 0
        ranks = gather_json([empty_host, sampler.peak, empty_device, device_peak])
        if not world.is_first:
            return
        block = sum(p.numel() for p in _meta_block(config).parameters())
        share = _BYTES_PER_PARAMETER * config.parameters() // world.size
        activations = activation_bytes(config, options.batch, options.seq_len, options.precision)
        rows = []
        for rank, (host_empty, host, device_empty, device) in enumerate(ranks):
            empty, peak = (device_empty, device) if cuda else (host_empty, host)
            bound = int(_SLACK * share) + 4 * block + activations + empty
            rows.append(
                {
                    "rank": rank,
                    "peak_bytes": peak,
                    "bound_bytes": bound,
                    "ratio": peak / bound,
                    "empty_bytes": empty,
                    "host_peak_bytes": host,
                    "host_empty_bytes": host_empty,
                }
            )
        row = {
            "layout": layout,
            "parameters": config.parameters(),
            "whole_model_bytes": 4 * config.parameters(),
            "share_bytes": share,
            "layer_bytes": 4 * block,
            "activation_bytes": activations,
            "final_loss": loss,
            "measure": "torch.cuda.max_memory_allocated" if cuda else "unique set size",
            "sharing_note": world.sharing_note,
            "ranks": rows,
        }
        options.rank_json.write_text(json.dumps(row))


def _meta_block(config: GPTConfig) -> nn.Module:
    with torch.device("meta"):
        return next(iter(GPT(replace(config, layers=1)).blocks.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", default="shard4,tp4,pp4")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks-per-gpu", type=int, default=1)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--rank-of-layout", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--rank-json", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of_layout is not None:
        run_rank(options)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in options.layouts.split(","):
            result = Path(folder, f"{layout}.json")
            command = [sys.executable, __file__, *sys.argv[1:], "--rank-of-layout", layout]
            code = LocalWorld(
                [*command, "--rank-json", str(result)],
                ranks=options.ranks,
                device=options.device,
                ranks_per_gpu=options.ranks_per_gpu,
            ).run()
            if code != 0:
                sys.exit(code)
            rows.append(json.loads(result.read_text()))
            worst = max(rows[-1]["ranks"], key=lambda rank: rank["ratio"])
            print(
                f"{layout}: {rows[-1]['parameters'] / 1e9:.2f} B parameters, largest peak "
                f"{worst['peak_bytes'] / 2**30:.2f} GiB on rank {worst['rank']}, bound "
                f"{worst['bound_bytes'] / 2**30:.2f} GiB: ratio {worst['ratio']:.2f}",
                flush=True,
            )
    result_json = {
        "schema": "tutti.training_memory/1",
        "command": [sys.executable, *sys.argv],
        "environment": describe_environment(),
        "rows": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result_json, indent=1) + "\n")


if __name__ == "__main__":
    main()
