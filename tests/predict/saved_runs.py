"""Run directories for tests: a recipe and two checkpoints, as `tutti train` writes them."""

from dataclasses import replace
from pathlib import Path

import torch

from tutti.models import GPT, GPTConfig
from tutti.train.checkpoint import Checkpoints
from tutti.train.recipe import RECIPES, Compute, Data, write_recipe

# Small, but divisible by the layouts: four heads, two key-value heads, three blocks.
CONFIG = GPTConfig(max_seq_len=12, layers=3, dim=32, heads=4, kv_heads=2)


def gpt_run(folder: Path, config: GPTConfig = CONFIG, precision: str = "float64") -> Path:
    """Save a run of a GPT for bytes, with large weights, so that probabilities differ clearly."""
    run = folder / "run"
    run.mkdir()
    text = folder / "text"
    text.write_bytes(bytes(range(256)) * 3 + b"the end of the text")
    recipe = replace(
        RECIPES["gpt"],
        architecture=config,
        data=Data(dataset="text", data_dir=text, seq_len=9),
        compute=Compute(precision=precision),  # type: ignore[arg-type]
    )
    (run / "recipe.toml").write_text(write_recipe(recipe, "gpt"))
    torch.manual_seed(0)
    model = GPT(config).to(torch.float64 if precision == "float64" else torch.float32)
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    with Checkpoints(run / "checkpoints") as checkpoints:
        checkpoints.save(5, model)
        model.blocks["0"].mlp.up.weight.data.mul_(1.1)
        checkpoints.save(6, model)
    return run
