"""LoRA: adapters train in each layout as on one device, and peft reads what tutti writes.

The expectations are those of transformers and peft: the first loss, `PeftModel.from_pretrained`,
`merge_and_unload` and the greedy `generate`. Tolerance: losses in float32 agree to 1e-6 relative at
the first step, and to 1e-4 after 20 steps, because each layout sums in another order. tutti parity
compares gradients and updates in float64 with its own tolerance of 1e-10.
"""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tiny_models import SIZES, save_tokenizer, save_tokens
from tutti.models.config import ModelError
from tutti.world.errors import UsageError
from worlds import in_world, run_tutti

pytestmark = pytest.mark.timeout(300)

SEQ_LEN, BATCH, STEPS = 16, 8, 20
# A column layer, a row layer, and the head, which is tied to the embedding in qwen2.
LORA = {
    "llama": "rank=4,alpha=8,targets=q_proj+o_proj",
    "qwen2": "rank=2,targets=lm_head+down_proj+k_proj",
    "gpt2": "rank=4",  # all linear layers are Conv1D, except the head
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tiny models, which transformers has saved, and a text."""
    import transformers as hf

    path = tmp_path_factory.mktemp("lora-models")
    torch.manual_seed(0)
    gpt2 = {"vocab_size": 256, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    models = {
        "llama": hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
        "qwen2": hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "gpt2": hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2, **dropout)),
        "bf16": hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).bfloat16(),
        "wide llama": hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | {"hidden_size": 64})),
    }
    for name, model in models.items():
        model.save_pretrained(path / name)
        save_tokenizer(path / name)
    save_tokens(path)
    return path


def recipe_of(folder: Path, name: str, layout: str, steps: int, **values: Any) -> Any:
    from tutti.train.recipe import RECIPES, with_values

    settings: dict[str, Any] = {
        "model": f"hf:{folder / name}",
        "lora": LORA.get(name, "rank=4,targets=q_proj+v_proj"),
        "data": {"dataset": "tokens", "data_dir": folder, "seq_len": SEQ_LEN},
        "batching": {"global_batch": BATCH},
        "optimization": {"lr": 1e-2, "schedule": "constant"},
        "parallel": {"layout": layout},
        "length": {"steps": steps, "evaluate": False, "checkpoint_every": 10},
    }
    return with_values(RECIPES["hf"], settings | values)


def train_all(world: tutti.World, folder: str, out: str, cases: list[Any]) -> dict[str, Any]:
    """Train each (name of the run, model, layout, steps, resume, initial weights, --lora)."""
    from tutti.parallel.mesh import local_shard
    from tutti.train.loop import Trainer
    from tutti.train.recipe import write_recipe
    from tutti.train.run_directory import RunDirectory
    from tutti.world.exchange import gather_json

    results = {}
    for key, name, layout, steps, resume, init_from, *lora in cases:
        values: dict[str, Any] = {"init_from": Path(init_from) if init_from else None}
        values |= {"lora": lora[0]} if lora else {}
        recipe = recipe_of(Path(folder), name, layout, steps, **values)
        directory = RunDirectory(Path(out, key.partition(":")[0]))
        directory.create()
        trainer = Trainer(world, recipe, directory, resume=resume)
        if world.is_first:
            directory.write("recipe.toml", write_recipe(recipe, "hf", world.size))
            directory.copy_model_files(recipe.model)
        start = _hashes(trainer.model)
        trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
        state = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
        trainer.run()
        lines = (directory.metrics / "rank0.jsonl").read_text().splitlines()
        results[key] = {
            "losses": [row["loss"] for row in map(json.loads, lines) if "loss" in row],
            "start": {n: h for each in gather_json(start) for n, h in each.items()},
            "trained": sorted({n for each in gather_json(sorted(trained)) for n in each}),
            "optimized": state,
            "dtypes": sorted({str(local_shard(p).dtype) for p in trainer.model.parameters()}),
        }
    return results


def _hashes(model: nn.Module) -> dict[str, str]:
    """Return the hash of every whole parameter of this rank's stages."""
    hashes = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        hashes[name] = hashlib.sha256(whole.detach().float().numpy().tobytes()).hexdigest()
    return hashes


def first_loss(folder: Path, name: str) -> float:
    """Return the loss of the first step, as transformers computes it from labels."""
    from transformers import AutoModelForCausalLM

    from tutti.data.sampler import EpochOrder
    from tutti.data.text_datasets import token_dataset

    samples = token_dataset(folder, SEQ_LEN).train
    inputs, targets = samples.batch(EpochOrder(len(samples)).samples(0, 0, BATCH).tolist())
    windows = torch.cat([inputs, targets[:, -1:]], dim=1)
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    return float(model(input_ids=windows, labels=windows).loss.detach())


def logits_of(model: Any) -> torch.Tensor:
    tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) * 7 % 256
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=tokens).logits
        return logits


def test_layouts_train_the_same_adapters_which_peft_reads(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    layouts = ("dp2", "shard2", "tp2", "pp2")
    cases: list[Any] = [[f"llama-{each}", "llama", each, STEPS, False, ""] for each in layouts]
    for model, layout in (("qwen2", "tp2"), ("gpt2", "tp2"), ("qwen2", "pp2"), ("gpt2", "pp2")):
        cases.append([f"{model}-{layout}", model, layout, 3, False, ""])
    cases.append(["bf16-shard2", "bf16", "shard2", 3, False, ""])
    # Ten steps, then ten more in the same layout, and in another layout.
    cases.append(["half", "llama", "tp2", 10, False, ""])
    cases.append(["half:again", "llama", "tp2", 20, True, ""])
    cases.append(["moved", "llama", "shard2", 10, False, ""])
    cases.append(["moved:to pp2", "llama", "pp2", 20, True, ""])
    # A run as the initial weights of another.
    cases.append(["next", "llama", "pp2", 1, False, str(tmp_path / "llama-shard2")])
    # Only the last stage of the pipeline has an adapter; the other stage has nothing to train.
    late = "rank=2,targets=layers.3.self_attn.q_proj"
    cases.append(["late", "llama", "pp2", 2, False, "", late])
    cases.append(["late:again", "llama", "tp2", 4, True, "", late])
    results = in_world(train_all, 2, str(folder), str(tmp_path), cases, timeout=280)[0]

    expected = first_loss(folder, "llama")
    for layout in layouts:
        run = results[f"llama-{layout}"]
        assert run["losses"][0] == pytest.approx(expected, rel=1e-6), layout
        assert run["losses"][-1] < 0.97 * run["losses"][0], layout
        assert run["losses"][-1] == pytest.approx(results["llama-dp2"]["losses"][-1], rel=1e-4)
        # Initial weights are equal bit for bit; only adapters are trained.
        assert run["start"] == results["llama-dp2"]["start"], layout
        assert {name.split(".")[-3] for name in run["trained"]} == {"lora_A", "lora_B"}
        assert len(run["trained"]) == 2 * 2 * SIZES["num_hidden_layers"]
    # A rank optimizes its half of the adapters: 4 layers × 2 targets × 4 × (32 + 32) values.
    assert results["llama-dp2"]["optimized"] == 4 * 2 * 4 * 64
    assert results["llama-shard2"]["optimized"] == 4 * 2 * 4 * 64  # numel of a DTensor is global
    for name in ("qwen2", "gpt2"):
        for layout in ("tp2", "pp2"):
            losses = results[f"{name}-{layout}"]["losses"]
            assert losses[0] == pytest.approx(first_loss(folder, name), rel=1e-6), (name, layout)
            assert losses[-1] == pytest.approx(results[f"{name}-tp2"]["losses"][-1], rel=1e-5)
    assert results["bf16-shard2"]["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert results["bf16-shard2"]["losses"][-1] < results["bf16-shard2"]["losses"][0]
    # The resumed run repeats the losses of the run without a pause, bit for bit.
    assert results["half:again"]["losses"] == results["llama-tp2"]["losses"]
    moved, straight = results["moved:to pp2"]["losses"], results["llama-pp2"]["losses"]
    assert moved[10:] == pytest.approx(straight[10:], rel=1e-4)
    assert len(results["late"]["trained"]) == 2 and len(results["late:again"]["losses"]) == 4
    assert results["late:again"]["losses"][0] == pytest.approx(expected, rel=1e-6)
    after = results["llama-shard2"]["losses"]
    assert results["next"]["losses"][0] == pytest.approx(after[-1], rel=0.05)

    from tutti.cli.export import main as export

    exported = ["llama-shard2", "llama-pp2", "qwen2-tp2", "gpt2-pp2", "bf16-shard2"]
    for key in exported:
        run, name = tmp_path / key, key.partition("-")[0]
        merged, alone = tmp_path / f"{key}-merged", tmp_path / f"{key}-adapter"
        assert export(["--run", str(run), "--to", str(merged)]) == 0
        assert export(["--run", str(run), "--to", str(alone), "--format", "adapter"]) == 0
        assert sorted(path.name for path in alone.iterdir()) == [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        base = AutoModelForCausalLM.from_pretrained(folder / name)
        before = logits_of(base)
        adapted = PeftModel.from_pretrained(base, alone)
        with_adapter = logits_of(adapted)
        assert not torch.allclose(with_adapter, before, rtol=1e-3), key
        loaded = AutoModelForCausalLM.from_pretrained(merged)
        tolerance = 0.1 if name == "bf16" else 1e-5
        torch.testing.assert_close(logits_of(loaded), with_adapter, atol=tolerance, rtol=tolerance)
        if name != "qwen2":  # peft would also add the adapter of the head to the tied embedding
            assert torch.equal(logits_of(loaded), logits_of(adapted.merge_and_unload())), key
    config = json.loads((tmp_path / "llama-pp2-adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert sorted(config["target_modules"]) == ["o_proj", "q_proj"]
    with pytest.raises(UsageError, match="needs a run with --lora"):
        recipe = tmp_path / "llama-dp2" / "recipe.toml"
        recipe.write_text(recipe.read_text().replace(f'lora = "{LORA["llama"]}"', 'lora = "none"'))
        flags = ["--run", str(tmp_path / "llama-dp2"), "--to", str(tmp_path / "x")]
        export([*flags, "--format", "adapter"])


def test_four_ranks_agree_with_one_device(folder: Path, tmp_path: Path) -> None:
    """Two axes at once, with a tied head as a target."""
    file = tmp_path / "parity.json"
    flags = ["--model", f"hf:{folder / 'qwen2'}", "--lora", LORA["qwen2"], "--seq-len", "8"]
    flags += ["--layouts", "tp2.pp2,shard2.tp2", "--steps", "2", "--json", str(file)]
    done = run_tutti("parity", "--device", "cpu", *flags, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in json.loads(file.read_text())["rows"]:
        assert row["ok"] and row["grad_rel_err"] < 1e-10 and row["loss_rel_err"] < 1e-10
        assert row["norm_rel_err"] < 1e-10 and "lora_" in row["worst_parameter"]


FROZEN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.requires_grad_(not frozen)
    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))

def model(trained=(2,)):
    # With pp2, the first stage has no trained parameter. The norm of the last block is frozen.
    torch.manual_seed(0)
    blocks = [Block(frozen=number not in trained) for number in range(4)]
    blocks[2].norm.requires_grad_(False)
    first, last = nn.Linear(8, 16), nn.Linear(16, 5)
    first.requires_grad_(False)
    return nn.Sequential(first, *blocks, last)

def only_first():
    # With pp2, the last stage has no trained parameter.
    net = model(trained=(0,))
    net[5].requires_grad_(False)
    return net
"""


def test_frozen_parameters_in_every_layout(tmp_path: Path) -> None:
    (tmp_path / "frozen.py").write_text(FROZEN)
    file = tmp_path / "parity.json"
    for model, schedule in (("model", "1f1b"), ("only_first", "gpipe")):
        flags = ["--model", f"frozen:{model}", "--layouts", "dp2,shard2,tp2,pp2", "--steps", "2"]
        flags += ["--pipeline-schedule", schedule, "--balance", "even", "--json", str(file)]
        done = run_tutti("parity", "--device", "cpu", *flags, timeout=200, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = {row["layout"]: row for row in json.loads(file.read_text())["rows"]}
        assert all(row["ok"] for row in rows.values()), rows


def test_text_of_each_adapter_is_that_of_peft(folder: Path, tmp_path: Path) -> None:
    """Adapters of different ranks and targets, one loaded model, tensor parallelism."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = ["the cat sat", "on a mat and then"]
    adapters = {
        "a": LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"]),
        "b": LoraConfig(r=2, lora_alpha=16, target_modules=["v_proj", "lm_head"], use_rslora=True),
    }
    for name, config in adapters.items():
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "llama"), config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.5)
        model.save_pretrained(tmp_path / name)
    tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
    expected = []
    for name in adapters:
        base = AutoModelForCausalLM.from_pretrained(folder / "llama")
        model = PeftModel.from_pretrained(base, tmp_path / name).eval()
        for prompt in prompts:
            tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
            mask = torch.ones_like(tokens)
            output = model.generate(
                input_ids=tokens, attention_mask=mask, max_new_tokens=16, do_sample=False
            )
            new = output[0, tokens.shape[1] :]
            expected.append(tokenizer.decode(new, skip_special_tokens=True))
    assert len(set(expected)) == 4, "the adapters must have different texts"
    flags = ["--tokens", "16", "--temperature", "0", "--device", "cpu", "--batch", "2"]
    flags += ["--adapter", str(tmp_path / "a"), "--adapter", str(tmp_path / "b")]
    flags += [word for prompt in prompts for word in ("--prompt", prompt)]
    for layout in ("tp2", "shard2"):
        out = tmp_path / "texts.jsonl"
        placed = ["--layout", layout, "--ranks", "2", "--out", out]
        done = run_tutti("predict", "--model", f"hf:{folder / 'llama'}", *flags, *placed)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["text"] for row in rows] == expected, layout
        assert [Path(row["adapter"]).name for row in rows] == ["a", "a", "b", "b"]


# -- wrong input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("rank=0", "rank must be at least 1, got 0"),
        ("rank=four", "rank 'four' is not a number"),
        ("ranks=4", "'ranks' is not one of rank, alpha, dropout, targets"),
        ("rank=4,rank=8", "'rank' is given twice"),
        ("dropout=1", "dropout must be from 0 to below 1"),
        ("alpha=0", "alpha must be above 0"),
        ("targets=q_proj+", "targets must be all-linear, or names"),
        ("targets=q_prj", "no linear layer 'q_prj': did you mean q_proj"),
        ("targets=query", "no linear layer 'query': choose from"),
    ],
)
def test_wrong_options_are_refused_before_ranks_start(
    lora: str, words: str, folder: Path, tmp_path: Path
) -> None:
    from tutti.cli.train import main as train

    flags = ["--dataset", "tokens", "--data-dir", str(folder), "--seq-len", "16", "--ranks", "2"]
    flags += ["--out", str(tmp_path / "run"), "--model", f"hf:{folder / 'llama'}"]
    with pytest.raises(UsageError, match=words):
        train([*flags, "--lora", lora])
    assert not (tmp_path / "run").exists()


def test_targets_without_a_usable_linear_layer_are_refused() -> None:
    from tutti.models.lora_layers import LoraOptions, add_adapters

    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 8)})
    norms = nn.Sequential(nn.LayerNorm(8))
    embedding = nn.ModuleDict({"embed": nn.Embedding(4, 4), "fc": nn.Linear(4, 4)})
    linear = nn.Linear(4, 4)
    shared = nn.ModuleDict({"first": nn.Sequential(linear), "second": nn.Sequential(linear)})
    for model, targets, words in (
        (shared, "all-linear", "layer first.0 is used in several places"),
        (norms, "all-linear", "Sequential has none"),
        (embedding, "embed", "has the type Embedding, but LoRA needs a Linear: choose from fc"),
        (attention, "out_proj", "MultiheadAttention, which reads its weight"),
    ):
        with pytest.raises(ModelError, match=words):
            add_adapters(model, LoraOptions.parse(f"targets={targets}"))


def test_peft_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from tutti.models.lora_layers import check_peft

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"--lora needs .* pip install 'tutti-torch\[hf\]'"):
        check_peft("--lora")


def test_wrong_adapter_folders_are_refused_before_ranks_start(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tutti.cli.predict import main as predict
    from tutti.cli.train import main as train

    base = AutoModelForCausalLM.from_pretrained(folder / "llama")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    get_peft_model(base, config).save_pretrained(tmp_path / "good")
    for name in ("truncated", "no config", "no weights", "dora"):
        shutil.copytree(tmp_path / "good", tmp_path / name)
    weights = tmp_path / "truncated" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    (tmp_path / "no config" / "adapter_config.json").unlink()
    (tmp_path / "no weights" / "adapter_model.safetensors").unlink()
    text = (tmp_path / "dora" / "adapter_config.json").read_text()
    (tmp_path / "dora" / "adapter_config.json").write_text(
        text.replace('"use_dora": false', '"use_dora": true')
    )
    cases = [
        ("truncated", "llama", "adapter_model.safetensors is truncated"),
        ("no config", "llama", "has no adapter_config.json"),
        ("no weights", "llama", "adapter_model.safetensors is missing"),
        ("dora", "llama", "use_dora is True, which is not supported"),
        ("none", "llama", "does not exist"),
        ("good", "wide llama", "is for another model: it adapts .*q_proj with 32 inputs"),
    ]
    for name, model, words in cases:
        flags = ["--model", f"hf:{folder / model}", "--prompt", "a", "--ranks", "2"]
        with pytest.raises(UsageError, match=words):
            predict([*flags, "--adapter", str(tmp_path / name)])
    data = ["--dataset", "tokens", "--data-dir", str(folder), "--seq-len", "16", "--ranks", "2"]
    data += ["--out", str(tmp_path / "run")]
    for flags, words in (
        ([], "is an adapter: add --lora rank=4,alpha=8"),
        (["--lora", "rank=8,alpha=8,targets=q_proj"], "has rank 4, but --lora has rank 8"),
        (["--lora", "rank=4,alpha=4,targets=q_proj"], "has alpha 8, but --lora has alpha 4"),
    ):
        model = ["--model", f"hf:{folder / 'llama'}", "--init-from", str(tmp_path / "good")]
        with pytest.raises(UsageError, match=words):
            train([*model, *data, *flags])
    flags = ["--model", f"hf:{folder / 'wide llama'}", "--init-from", str(tmp_path / "good")]
    with pytest.raises(UsageError, match="is for another model"):
        train([*flags, *data, "--lora", "rank=4,alpha=8,targets=q_proj"])
    flags = ["--recipe", "gpt", "--lora", "rank=4,alpha=8", "--init-from", str(tmp_path / "good")]
    with pytest.raises(UsageError, match="without the weights of --model gpt"):
        train([*flags, "--out", str(tmp_path / "run")])
    # The targets are compared with those of the built model.
    from tutti.train.init import build_meta_model

    recipe = recipe_of(folder, "llama", "dp1", 1, init_from=tmp_path / "good")
    with pytest.raises(UsageError, match="but --lora gives it"):
        build_meta_model(recipe, None)
    # Rank × scale of this adapter is 7 × (29 / 7), which is 29 except for a rounding error.
    from tutti.train.recipe_check import check_recipe

    config = LoraConfig(r=7, lora_alpha=29, target_modules=["o_proj"])
    base = AutoModelForCausalLM.from_pretrained(folder / "llama")
    get_peft_model(base, config).save_pretrained(tmp_path / "rounded")
    recipe = replace(recipe, init_from=tmp_path / "rounded", lora="rank=7,alpha=29,targets=o_proj")
    check_recipe(recipe, 1, "cpu")
