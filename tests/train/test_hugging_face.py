"""Hugging Face models: loaded, trained, exported and loaded again by transformers, in each layout.

The expectation is transformers' own: `from_pretrained`, its loss with `labels`, and its logits.
Tolerance: first losses in float32 agree to 1e-6 relative, which is a few roundings.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from worlds import in_world

pytestmark = pytest.mark.timeout(300)

SEQ_LEN, BATCH, STEPS = 16, 8, 20
SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tiny models, which transformers has saved, and a text."""
    import transformers as hf

    path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    gpt2 = {"vocab_size": 256, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    models = {
        "llama": hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
        "qwen2": hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "gpt2": hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2, **dropout)),
        "mixtral": hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4)),
        "bf16": hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).bfloat16(),
    }
    for name, model in models.items():
        # Several files, and one file.
        model.save_pretrained(path / name, max_shard_size="20KB" if name == "llama" else "1GB")
        (path / name / "tokenizer.json").write_text("{}")
    words = ("the cat sat on a mat", "and then it went away", "to the house")
    text = " ".join(words[number % 11 % len(words)] for number in range(7, 7000, 7))
    (path / "text.txt").write_text(text)
    return path


def recipe_of(folder: Path, name: str, layout: str, steps: int) -> Any:
    from tutti.train.recipe import RECIPES, with_values

    return with_values(
        RECIPES["hf"],
        {
            "model": f"hf:{folder / name}",
            "data": {"dataset": "text", "data_dir": folder / "text.txt", "seq_len": SEQ_LEN},
            "batching": {"global_batch": BATCH},
            "optimization": {"lr": 1e-3},
            "parallel": {"layout": layout},
            "length": {"steps": steps, "evaluate": False},
        },
    )


def train_all(world: tutti.World, folder: str, out: str, cases: list[list[Any]]) -> dict[str, Any]:
    """Train each (model, layout, steps). Return the losses of each."""
    from tutti.train.loop import Trainer
    from tutti.train.recipe import write_recipe
    from tutti.train.run_directory import RunDirectory

    results = {}
    for name, layout, steps in cases:
        recipe = recipe_of(Path(folder), name, layout, steps)
        directory = RunDirectory(Path(out, f"{name}-{layout}"))
        directory.create()
        trainer = Trainer(world, recipe, directory)
        if world.is_first:
            directory.write("recipe.toml", write_recipe(recipe, "hf", world.size))
        trainer.run()
        lines = (directory.metrics / "rank0.jsonl").read_text().splitlines()
        losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
        dtypes = {str(parameter.dtype) for parameter in trainer.model.parameters()}
        results[f"{name} {layout}"] = {"losses": losses, "dtypes": sorted(dtypes)}
    return results


def first_loss(folder: Path, name: str) -> float:
    """Return the loss of the first step, as transformers computes it from labels."""
    from transformers import AutoModelForCausalLM

    from tutti.data.sampler import EpochOrder
    from tutti.data.text_datasets import byte_dataset

    samples = byte_dataset(folder / "text.txt", SEQ_LEN).train
    inputs, targets = samples.batch(EpochOrder(len(samples)).samples(0, 0, BATCH).tolist())
    windows = torch.cat([inputs, targets[:, -1:]], dim=1)
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    return float(model(input_ids=windows, labels=windows).loss.detach())


def test_the_layouts_start_with_the_loss_of_transformers_and_learn(
    folder: Path, tmp_path: Path
) -> None:
    names = ("llama", "qwen2", "gpt2", "mixtral")
    cases = [[name, "dp2", 2] for name in names] + [[name, "shard2", STEPS] for name in names]
    cases += [["bf16", "shard2", 3]]
    (results, _) = in_world(train_all, 2, str(folder), str(tmp_path), cases, timeout=250)
    for name in names:
        expected = first_loss(folder, name)
        for layout in ("dp2", "shard2"):
            losses = results[f"{name} {layout}"]["losses"]
            assert losses[0] == pytest.approx(expected, rel=1e-6), (name, layout)
        assert losses[-1] < 0.95 * losses[0], name
    assert results["bf16 shard2"]["dtypes"] == ["torch.bfloat16"]
    assert results["bf16 shard2"]["losses"][0] == pytest.approx(
        first_loss(folder, "bf16"), rel=0.01
    )
