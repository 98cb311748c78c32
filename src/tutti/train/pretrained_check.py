"""Checks of --lora, --init-from and models of other libraries, without torch (see recipe_check)."""

import math
import os

from tutti.data.dataset_files import (
    BYTE_VOCABULARY_SIZE,
    IMAGE_DATASETS,
    TEXT_DATASETS,
    dataset_kind,
    has_tokenizer,
)
from tutti.models.config import ModelError, split_source
from tutti.models.lora_layers import (
    ALL_LINEAR,
    LoraOptions,
    check_adapter_files,
    check_peft,
    check_target_names,
    is_adapter_folder,
    read_adapter,
)
from tutti.models.pretrained import check_source, read_folder, saved_tensors
from tutti.parallel.layout import Layout, check_divides, check_stages
from tutti.train.recipe import RECIPES, Recipe, read_recipe
from tutti.world.errors import UsageError


def check_pretrained(recipe: Recipe, weights: bool) -> None:
    """Raise UsageError if the adapters, the saved weights or the library model cannot be used."""
    try:
        lora = _check_lora(recipe, weights)
        _check_init_from(recipe, lora)
        if source := split_source(recipe.model):
            _check_hugging_face(recipe, *source, weights)
    except ModelError as error:
        raise UsageError(str(error)) from None


def _check_lora(recipe: Recipe, weights: bool) -> LoraOptions | None:
    """Check the options of --lora, and its targets if the names of the layers are known."""
    if recipe.lora is None:
        return None
    lora = LoraOptions.parse(recipe.lora)
    check_peft("--lora")
    layers: list[str] = []
    if recipe.model == "gpt":
        layers = ["wq", "wk", "wv", "wo", "gate", "up", "down", "head"]
    elif recipe.model.startswith("hf:") and weights:
        saved = read_folder(recipe.model.partition(":")[2]).tensors.values()
        matrices = [each.key for each in saved if len(each.shape) == 2]
        layers = [key.removesuffix(".weight") for key in matrices if key.endswith(".weight")]
        layers.append("lm_head")  # not in the files if it is tied to the embedding
    if layers and lora.targets != (ALL_LINEAR,):
        # The full name of a layer may differ between the model and the files. So only the last part
        # of a target is checked here, and the full name is checked when the model is built.
        check_target_names([target.rpartition(".")[2] for target in lora.targets], layers)
    return lora


def _check_init_from(recipe: Recipe, lora: LoraOptions | None) -> None:
    source = recipe.init_from
    if source is None:
        return
    if not os.path.isdir(source):  # Path.is_dir raises OSError for a name that is too long
        problem = "is a file" if os.path.isfile(source) else "does not exist"
        raise UsageError(f"--init-from {source} {problem}: give a run directory or a folder")
    saved: LoraOptions | None = None
    if (source / "recipe.toml").is_file():
        if not any((source / "checkpoints").glob("step-*")):
            raise UsageError(f"--init-from {source} has no checkpoint: use a run with a checkpoint")
        text = read_recipe(str(source / "recipe.toml")).lora
        saved = None if text is None else LoraOptions.parse(text)
        if saved is not None and lora is None:
            raise UsageError(
                f"--init-from {source} is a run with --lora {text}: add this --lora, or give the "
                "folder that tutti export writes"
            )
    elif is_adapter_folder(source):
        adapter = read_adapter(source, "--init-from")
        saved = LoraOptions(adapter.rank, adapter.rank * adapter.scale)
        if recipe.model in RECIPES:
            raise UsageError(
                f"--init-from {source} is an adapter without the weights of --model "
                f"{recipe.model}: give the run in which it was trained"
            )
        if recipe.model.startswith("hf:"):
            check_adapter_files(adapter, read_folder(recipe.model.partition(":")[2]))
        if lora is None:
            raise UsageError(
                f"--init-from {source} is an adapter: add --lora rank={saved.rank},alpha="
                f"{saved.alpha:g} with its targets"
            )
    else:
        try:
            saved_tensors(source)
        except ModelError as error:
            raise UsageError(f"--init-from: {error}") from None
    if lora is not None and saved is not None:
        for name in ("rank", "alpha"):
            value, found = getattr(lora, name), getattr(saved, name)
            # The alpha of an adapter folder is rank × scale, which is rounded.
            if not math.isclose(value, found, rel_tol=1e-4):
                raise UsageError(
                    f"--init-from {source} has {name} {found:g}, but --lora has {name} {value:g}: "
                    f"use {name}={found:g}"
                )


def _check_hugging_face(recipe: Recipe, source: str, name: str, weights: bool) -> None:
    """Check the package and the folder of the model, and that config.json fits the dataset."""
    check_source(source, name, weights=weights)
    if source != "hf":
        return
    folder = read_folder(name, weights=weights)
    data, config = recipe.data, folder.path / "config.json"
    kind = dataset_kind(data.dataset)
    if kind in IMAGE_DATASETS:
        raise UsageError(
            f"--model {recipe.model} needs text, but dataset {data.dataset} has none: use "
            "--dataset text:FILE"
        )
    if kind not in (*TEXT_DATASETS, "synthetic"):
        return
    if folder.max_seq_len is not None and data.seq_len > folder.max_seq_len:
        raise UsageError(
            f"--seq-len {data.seq_len} is longer than the model's {folder.max_seq_len} positions "
            f"({config}): use --seq-len {folder.max_seq_len} or less"
        )
    bytes_only = kind == "stdlib" or (kind != "tokens" and not has_tokenizer(folder.path))
    if bytes_only and folder.vocabulary is not None and folder.vocabulary < BYTE_VOCABULARY_SIZE:
        raise UsageError(
            f"--dataset {data.dataset} has {BYTE_VOCABULARY_SIZE} tokens, but the model has "
            f"{folder.vocabulary} ({config}): use --dataset tokens"
        )


def check_hugging_face_layout(recipe: Recipe, layout: Layout) -> None:
    """Check the numbers of heads and layers in config.json. The built model is checked later."""
    folder = read_folder(recipe.model.partition(":")[2], weights=False)
    config, file = folder.config, folder.path / "config.json"
    for names, unit in (
        (("num_attention_heads", "n_head"), "attention heads"),
        (("num_key_value_heads",), "key and value heads"),
    ):
        for name in names:
            if layout.tp > 1 and isinstance(config.get(name), int):
                check_divides(layout.tp, config[name], f"{unit} ({name} in {file})")
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    if layout.pp > 1 and isinstance(layers, int):
        counted = f"{layers} layers in {file}, the embedding, and the final norm with the head"
        check_stages(layers + 2, layout.pp, recipe.parallel.virtual_stages, counted)
