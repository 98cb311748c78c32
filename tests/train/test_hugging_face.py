"""Hugging Face models: loaded, trained, exported and loaded again by transformers, in each layout.

The expectation is transformers' own: `from_pretrained`, its loss with `labels`, and its logits.
Tolerance: first losses in float32 agree to 1e-6 relative, which is a few roundings.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from tiny_models import SIZES, save_tokenizer, save_tokens
from tutti.world.errors import UsageError
from worlds import in_world, run_tutti

pytestmark = pytest.mark.timeout(300)

SEQ_LEN, BATCH, STEPS = 16, 8, 20


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
        "other llama": hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
        "bf16": hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).bfloat16(),
    }
    for name, model in models.items():
        # Several files, and one file.
        model.save_pretrained(path / name, max_shard_size="20KB" if name == "llama" else "1GB")
        save_tokenizer(path / name)
    save_tokens(path)
    return path


def recipe_of(folder: Path, name: str, layout: str, steps: int, init_from: str = "") -> Any:
    from tutti.train.recipe import RECIPES, with_values

    return with_values(
        RECIPES["hf"],
        {
            "model": f"hf:{folder / name}",
            "init_from": Path(init_from) if init_from else None,
            "data": {"dataset": "tokens", "data_dir": folder, "seq_len": SEQ_LEN},
            "batching": {"global_batch": BATCH},
            "optimization": {"lr": 1e-3},
            "parallel": {"layout": layout},
            "length": {"steps": steps, "evaluate": False},
        },
    )


def train_all(world: tutti.World, folder: str, out: str, cases: list[list[Any]]) -> dict[str, Any]:
    """Train each (model, layout, steps, initial weights). Return the losses of each."""
    from tutti.train.loop import Trainer
    from tutti.train.recipe import write_recipe
    from tutti.train.run_directory import RunDirectory

    results = {}
    for name, layout, steps, *init_from in cases:
        recipe = recipe_of(Path(folder), name, layout, steps, *init_from)
        key = f"{name} {layout}" + " initialised" * bool(init_from)
        directory = RunDirectory(Path(out, key.replace(" ", "-")))
        directory.create()
        trainer = Trainer(world, recipe, directory)
        if world.is_first:
            directory.write("recipe.toml", write_recipe(recipe, "hf", world.size))
            directory.copy_model_files(recipe.model)
        trainer.run()
        lines = (directory.metrics / "rank0.jsonl").read_text().splitlines()
        losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
        dtypes = {str(parameter.dtype) for parameter in trainer.model.parameters()}
        results[key] = {"losses": losses, "dtypes": sorted(dtypes)}
    return results


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


def test_layouts_start_with_the_loss_of_transformers_learn_and_are_exported(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    names = ("llama", "qwen2", "gpt2", "mixtral")
    layouts = {"dp2": 1, "tp2": 2, "pp2": 2, "shard2": STEPS}
    cases = [[name, layout, steps] for name in names for layout, steps in layouts.items()]
    cases[2][2] = STEPS  # llama in pp2
    cases += [["bf16", "shard2", 3]]
    # Weights of a run in another layout, and of another folder.
    cases += [["qwen2", "pp2", 1, str(tmp_path / "qwen2-tp2")]]
    cases += [["llama", "tp2", 1, str(folder / "other llama")]]
    (results, _) = in_world(train_all, 2, str(folder), str(tmp_path), cases, timeout=280)
    for name in names:
        expected = first_loss(folder, name)
        for layout in ("dp2", "shard2", "tp2", "pp2"):
            losses = results[f"{name} {layout}"]["losses"]
            assert losses[0] == pytest.approx(expected, rel=1e-6), (name, layout)
        losses = results[f"{name} shard2"]["losses"]
        assert losses[-1] < 0.95 * losses[0], name
    # Twenty steps in another layout end with the same loss.
    ends = [results[f"llama {layout}"]["losses"][-1] for layout in ("shard2", "pp2")]
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)
    # A run of one more step begins with the loss after the last step of the other run.
    losses = results["qwen2 pp2 initialised"]["losses"]
    assert losses[0] < results["qwen2 tp2"]["losses"][1]
    expected = first_loss(folder, "other llama")
    assert results["llama tp2 initialised"]["losses"][0] == pytest.approx(expected, rel=1e-6)
    assert expected != pytest.approx(first_loss(folder, "llama"), rel=1e-4)
    assert results["bf16 shard2"]["dtypes"] == ["torch.bfloat16"]
    expected = first_loss(folder, "bf16")
    assert results["bf16 shard2"]["losses"][0] == pytest.approx(expected, rel=0.01)

    from tutti.cli.export import main as export
    from tutti.train.checkpoint import Checkpoints

    for name, layout in (
        *(("llama", "shard2"), ("llama", "pp2"), ("qwen2", "tp2"), ("gpt2", "pp2")),
        *(("mixtral", "shard2"), ("bf16", "shard2")),
    ):
        run, to = tmp_path / f"{name}-{layout}", tmp_path / "exported" / f"{name}-{layout}"
        assert export(["--run", str(run), "--to", str(to)]) == 0
        loaded = AutoModelForCausalLM.from_pretrained(to)
        # The same checkpoint, loaded into a model of transformers by tutti.
        expected_model = AutoModelForCausalLM.from_pretrained(folder / name)
        Checkpoints(run / "checkpoints").load(expected_model, rng=False)
        assert loaded.dtype == expected_model.dtype
        assert torch.equal(logits_of(loaded), logits_of(expected_model)), (name, layout)
        assert not torch.equal(
            logits_of(loaded), logits_of(AutoModelForCausalLM.from_pretrained(folder / name))
        )
        assert (to / "tokenizer.json").read_text() == (folder / name / "tokenizer.json").read_text()
        assert "lr = 0.001" in (to / "README.md").read_text()
    shard2 = tmp_path / "llama-shard2"
    assert export(["--run", str(shard2), "--to", str(to / "a"), "--format", "state_dict"]) == 0
    state = torch.load(to / "a" / "model.pt", weights_only=True)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "exported" / "llama-shard2")
    assert state.keys() == saved.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in saved.state_dict().items())
    for flags, words in (
        (["--run", str(shard2), "--to", str(to)], "is not empty"),
        (["--run", str(tmp_path / "none"), "--to", str(tmp_path / "b")], "does not exist"),
        (
            ["--run", str(shard2), "--to", str(tmp_path / "b"), "--checkpoint", "7"],
            "--checkpoint 7",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            export(flags)
    assert not (tmp_path / "b").exists()


def test_greedy_text_is_that_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Prompts of different lengths in one batch, with tensor parallelism and a key-value cache."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = ["the cat sat", "on a mat and then it went", "ab"]
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    out = tmp_path / "texts.jsonl"
    flags = ["--prompts", tmp_path / "prompts.txt", "--tokens", "20", "--temperature", "0"]
    flags += ["--batch", "3", "--layout", "tp2", "--ranks", "2", "--device", "cpu", "--out", out]
    flags += ["--json", tmp_path / "result.json"]
    done = run_tutti("predict", "--model", f"hf:{folder / 'qwen2'}", *flags, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen2")
    tokenizer = AutoTokenizer.from_pretrained(folder / "qwen2")
    for prompt, row in zip(prompts, rows, strict=True):
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(tokens)
        output = model.generate(tokens, attention_mask=mask, max_new_tokens=20, do_sample=False)
        new = output[0, tokens.shape[1] :]
        assert row["text"] == tokenizer.decode(new, skip_special_tokens=True)
        assert row["tokens"] == len(new)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["generated_tokens"] == 60 and result["tokens_per_s"] > 0


def test_a_run_predicts_without_the_folder_of_its_model(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "qwen2", tmp_path / "model")
    (tmp_path / "text.txt").write_text("the cat sat on a mat and then it went away. " * 60)
    run = tmp_path / "run"
    train = ["--model", f"hf:{tmp_path / 'model'}", "--dataset", f"text:{tmp_path / 'text.txt'}"]
    train += ["--seq-len", "16", "--steps", "2", "--device", "cpu", "--out", str(run)]
    done = run_tutti("train", *train)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "model")
    for flags in (["--prompt", "the cat", "--tokens", "4"], []):
        done = run_tutti("predict", "--run", str(run), "--device", "cpu", *flags)
        assert done.returncode == 0, done.stderr
    assert (run / "predictions-test.jsonl").exists()


def _change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    kept = {key: value for key, value in (config | changes).items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))


def _damage(path: Path, damage: str) -> None:
    file = path / "model-00002-of-00012.safetensors"
    if damage == "missing file":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "not safetensors":
        file.write_bytes(b"garbage that is not a header")
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "quantised":
        _change_config(path, quantization_config={"bits": 4})
    elif damage == "float8":
        header = b'{"a":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}'
        file.write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    elif damage == "no weights":
        for each in path.glob("model*"):
            each.unlink()
    elif damage == "index":
        index = path / "model.safetensors.index.json"
        index.write_text(index.read_text().replace("lm_head.weight", "other.weight"))
    elif damage == "config":
        (path / "config.json").write_text("{")
    elif damage == "no type":
        _change_config(path, model_type=None)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing file", "model-00002-of-00012.safetensors is missing"),
        ("truncated", "model-00002-of-00012.safetensors is truncated"),
        ("not safetensors", "model-00002-of-00012.safetensors is truncated or not"),
        ("empty", r"model-00002-of-00012.safetensors .*\(0 bytes\)"),
        ("quantised", "config.json: the weights are quantised"),
        ("float8", "model-00002-of-00012.safetensors: a has dtype F8_E4M3"),
        ("no weights", "no safetensors weights"),
        ("index", "has no tensor other.weight"),
        ("config", "config.json is not JSON"),
        ("no type", "config.json has no model_type"),
    ],
)
def test_a_damaged_folder_is_refused_before_ranks_start(
    damage: str, words: str, folder: Path, tmp_path: Path
) -> None:
    from tutti.cli.train import main as train

    bad = tmp_path / "bad"
    shutil.copytree(folder / "llama", bad)
    _damage(bad, damage)
    text = ["--dataset", "tokens", "--data-dir", str(folder), "--seq-len", "16"]
    with pytest.raises(UsageError, match=words):
        train(["--model", f"hf:{bad}", *text, "--ranks", "2", "--out", str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "unknown"}, "config.json: transformers cannot build a unknown"),
        ({"hidden_size": 64, "head_dim": 16}, r"has shape .* config.json gives it the shape"),
        ({"num_hidden_layers": 5}, r"has no weights for model.layers.4"),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_refused(
    changes: dict[str, Any], words: str, folder: Path, tmp_path: Path
) -> None:
    from tutti.models.config import ModelError
    from tutti.train.init import build_meta_model

    shutil.copytree(folder / "llama", tmp_path / "llama")
    _change_config(tmp_path / "llama", **changes)
    with pytest.raises(ModelError, match=words):
        build_meta_model(recipe_of(tmp_path, "llama", "dp1", 1), None)


def test_three_axes_at_once(folder: Path, tmp_path: Path) -> None:
    cases = [["llama", "dp2.tp2.pp2", 2], ["gpt2", "dp2.tp2.pp2", 2]]
    results = in_world(train_all, 8, str(folder), str(tmp_path), cases, timeout=280)[0]
    for name in ("llama", "gpt2"):
        losses = results[f"{name} dp2.tp2.pp2"]["losses"]
        assert losses[0] == pytest.approx(first_loss(folder, name), rel=1e-6), name
        assert losses[1] < losses[0]
