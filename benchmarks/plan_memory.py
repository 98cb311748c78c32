"""Memory of Megatron's GPT in the plan against the figures of Korthikanti et al., arXiv 2205.05198.

    python benchmarks/plan_memory.py --json benchmarks/plan_memory_DATE.json

The paper trains GPTs of 22 B to 1 T parameters in fp16 with tp 8 on 8 to 512 A100. Figure 1 has the
memory of parameters and optimizer state, and of activations on the first pipeline stage, without
and with sequence parallelism and selective recomputation. Figure 7 has the activations of every
technique in percent of none of them. Their transformer layer is written here as a plain module, and
the planner traces it: nothing in the planner knows the formulas of the paper. The paper's selective
recomputation repeats only the attention of a layer, so the module calls torch's checkpoint there.
With sequence parallelism, Megatron gathers the inputs of the column layers again in backward, but
tutti keeps them: the bytes of the traced all-gathers are subtracted.

The paper counts the activations that layers keep, for all microbatches in flight, and 18 bytes for
each parameter of the layers: fp16 parameter, fp32 gradient, fp32 parameter and the two moments.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tutti.data.dataset import Dataset, TensorSamples
from tutti.machine.environment import describe_environment
from tutti.plan.memory_estimate import largest_in_flight
from tutti.plan.model_trace import ModelTracer
from tutti.train.recipe import RECIPES

sys.path.insert(0, str(Path(__file__).parent))  # so that a recipe can name megatron() below
GIB = 2**30
TP, VOCABULARY, SEQ_LEN = 8, 51_200, 2048
STATE_BYTES = 18  # of one parameter, in the paper's mixed precision

# name: heads, hidden, layers, pp, stages per rank, microbatches, microbatch size;
# figure 1 in GiB: parameters and optimizer, activations without and with both techniques;
# figure 7 in percent: sequence parallel, selective, both, full recomputation
FIGURES: dict[str, tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]] = {
    "22B": ((64, 6144, 48, 1, 1, 1, 4), (45.56, 59.25, 9.56), (66.84, 49.42, 16.18, 7.64)),
    "175B": ((96, 12288, 96, 8, 3, 64, 1), (45.56, 66.84, 12.35), (62.04, 56.53, 18.49, 8.71)),
    "530B": ((128, 20480, 105, 35, 3, 280, 1), (31.64, 114.02, 23.08), (58.31, 62.04, 20.27, 9.42)),
    "1T": ((160, 25600, 128, 64, 1, 512, 1), (32.96, 131.25, 26.56), (58.31, 62.04, 20.27, 9.42)),
}


class Attention(nn.Module):
    """Attention of separate matrix products, softmax and dropout, as in Megatron in 2022."""

    def __init__(self, dim: int, heads: int, recompute: bool) -> None:
        super().__init__()
        self.head_dim, self.recompute = dim // heads, recompute
        self.wq, self.wk, self.wv = (nn.Linear(dim, dim) for _ in range(3))
        self.wo = nn.Linear(dim, dim)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = F.softmax(q @ k.transpose(-1, -2), dim=-1)
        return F.dropout(scores, 0.1) @ v

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        parts = heads(self.wq(x)), heads(self.wk(x)), heads(self.wv(x))
        if self.recompute:
            y = checkpoint(self.core, *parts, use_reentrant=False)
        else:
            y = self.core(*parts)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, recompute: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.mlp = Attention(dim, heads, recompute), MLP(dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


class Megatron(nn.Sequential):
    """Embedding, layers, norm and head."""

    def __init__(self, dim: int, heads: int, layers: int, recompute: bool) -> None:
        blocks = [Block(dim, heads, recompute) for _ in range(layers)]
        embed = nn.Embedding(VOCABULARY, dim)
        head = nn.Linear(dim, VOCABULARY, bias=False)
        super().__init__(embed, *blocks, nn.LayerNorm(dim), head)
        last = layers + 1
        self.sharding_rules = {
            "0": "vocabulary",
            **{f"{i}.norm{n}": "norm" for i in range(1, last) for n in (1, 2)},
            **{f"{i}.attention": "input" for i in range(1, last)},
            **{f"{i}.attention.{n}": "column" for i in range(1, last) for n in ("wq", "wk", "wv")},
            **{f"{i}.attention.wo": "row" for i in range(1, last)},
            **{f"{i}.mlp.fc1": "column" for i in range(1, last)},
            **{f"{i}.mlp.fc2": "row" for i in range(1, last)},
            str(last): "norm",
            str(last + 1): "head",
        }


def megatron() -> nn.Module:
    """The model whose sizes are in the environment: a recipe names a function without arguments."""
    dim, heads, layers, recompute = json.loads(os.environ["PLAN_MEMORY_MODEL"])
    return Megatron(dim, heads, layers, bool(recompute)).half()


def activations(name: str, sequence: bool, selective: bool, full: bool) -> tuple[float, float]:
    """Return bytes of kept activations on the first pipeline rank, and bytes of model state."""
    (heads, dim, layers, pp, stages, microbatches, batch), _, _ = FIGURES[name]
    # Three blocks are enough: all blocks are equal.
    os.environ["PLAN_MEMORY_MODEL"] = json.dumps([dim, heads, 3, int(selective)])
    base = RECIPES["own"]
    recipe = replace(
        base,
        model="plan_memory:megatron",
        parallel=replace(base.parallel, sequence_parallel=sequence),
    )
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    samples = TensorSamples(tokens, tokens)
    # The paper counts the bytes of tensors, without the allocator.
    tracer = ModelTracer(recipe, Dataset("tokens", samples, samples), allocator=False)
    workload = tracer.workload(TP, batch)
    block = workload.units[2]
    kept = float(block.memory["full" if full else "none"].kept)
    if sequence:
        # tutti keeps the gathered inputs of the column layers. Megatron keeps this rank's part of
        # them and gathers again in backward.
        gathered = sum(each.bytes for each in block.forward if each.name == "all_gather")
        kept -= gathered * (1 - 1 / TP)
    # The first rank of a pipeline has layers / pp layers, for the microbatches in flight.
    schedule = "interleaved" if stages > 1 else "1f1b"
    chunks = sum(largest_in_flight(schedule, pp, microbatches, stages))
    in_flight = chunks * layers / (pp * stages)
    parameters = sum(each.elements for each in block.parameters) * layers / pp
    return in_flight * kept, STATE_BYTES * parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(FIGURES))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.models.split(","):
        _, (state, none_gib, both_gib), percents = FIGURES[name]
        none, held = activations(name, False, False, False)
        techniques = [(True, False, False), (False, True, False), (True, True, False)]
        techniques.append((False, False, True))
        sizes = [activations(name, *each)[0] for each in techniques]
        for term, predicted, published in (
            ("parameters and optimizer, GiB", held / GIB, state),
            ("activations, GiB", none / GIB, none_gib),
            ("activations, both techniques, GiB", sizes[2] / GIB, both_gib),
            ("sequence parallel, % of activations", 100 * sizes[0] / none, percents[0]),
            ("selective, %", 100 * sizes[1] / none, percents[1]),
            ("both, %", 100 * sizes[2] / none, percents[2]),
            ("full recomputation, %", 100 * sizes[3] / none, percents[3]),
        ):
            error = predicted / published - 1
            rows.append(
                {"model": name, "term": term, "predicted": predicted, "published": published}
                | {"error": error}
            )
            print(f"{name:5} {term:38} {predicted:8.2f} {published:8.2f} {100 * error:+.2f} %")
    worst = max(abs(row["error"]) for row in rows)
    print(f"largest error {100 * worst:.2f} %, mean {_mean(rows):.2f} %")
    if options.json is not None:
        content = {
            "schema": "tutti.plan_memory/1",
            "command": ["python", *sys.argv],
            "environment": describe_environment(),
            "source": "Korthikanti et al., arXiv 2205.05198, figures 1 and 7",
            "rows": rows,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def _mean(rows: list[dict[str, Any]]) -> float:
    return 100 * math.fsum(abs(row["error"]) for row in rows) / len(rows)


if __name__ == "__main__":
    main()
