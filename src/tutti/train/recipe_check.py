"""Checks a recipe by arithmetic, names and paths. The checks need no torch and take milliseconds.

The process that starts the ranks calls `check_recipe` first, so a recipe that cannot work is
refused before a rank exists. Every rank also calls `check_recipe`, because torchrun starts ranks
without this check. Functions import the checks of optional features, such as LoRA, when they need
them.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from tutti.data import DataError
from tutti.data.dataset_files import (
    BYTE_VOCABULARY_SIZE,
    DATASETS,
    IMAGE_DATASETS,
    IMAGE_SIZES,
    TEXT_DATASETS,
    check_files,
    dataset_kind,
    dataset_path,
)
from tutti.models.config import (
    GPTConfig,
    LeNetConfig,
    OwnModelConfig,
    WideResNetConfig,
    split_source,
)
from tutti.parallel.layout import (
    Layout,
    check_divides,
    check_engine,
    check_microbatches,
    check_sequence,
    check_stages,
    check_techniques,
    flag_of,
    leave_out,
)
from tutti.train.recipe import RECIPES, Architecture, Recipe
from tutti.train.training_schedule import TrainingSchedule, check_numbers, make_schedule
from tutti.world.errors import UsageError, did_you_mean

_BYTE_DATASETS = ("stdlib", "text", "jsonl", "parquet")  # read as bytes by the model gpt
# Optimizers of torch.optim, each with the fields of the recipe that it uses.
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum", "weight_decay"),
    **dict.fromkeys(("adamw", "adam", "adamax", "nadam", "radam"), ("betas", "weight_decay")),
    **dict.fromkeys(("adadelta", "adafactor", "adagrad", "asgd", "rmsprop"), ("weight_decay",)),
    "rprop": (),
}
_OTHER_OPTIMIZERS = {
    "lbfgs": "it calls the model several times in a step",
    "muon": "it takes only matrices",
    "sparseadam": "it takes only sparse gradients",
}
LOSSES = ("cross_entropy", "mse", "bce", "model")
METRICS = ("accuracy", "mse", "mae", "none")
# Used as the length of the training set, which is not known before the dataset is loaded.
MANY_SAMPLES = 1 << 40


def check_recipe(recipe: Recipe, ranks: int, device: str) -> None:
    """Raise UsageError if the recipe cannot run on `ranks` ranks; device: cpu or cuda."""
    schedule = make_schedule(recipe, ranks, MANY_SAMPLES)  # checks numbers, layout and batch
    check_cuda_graph(recipe, ranks, device)
    check_model_and_data(recipe, schedule.layout, schedule.rank_batch, device)
    check_dataset_sizes(recipe)
    check_techniques_of(recipe, schedule)


def check_techniques_of(recipe: Recipe, schedule: TrainingSchedule) -> None:
    """Raise UsageError if loss, optimizer, engine or model do not fit the layout of a schedule."""
    _check_task(recipe, schedule.layout)
    _check_optimizer(recipe, schedule.layout)
    check_engine(recipe.engine, schedule.layout)
    _check_layout(recipe, schedule.layout, schedule.accumulation)


def check_model_and_data(
    recipe: Recipe, layout: Layout, rank_batch: int, device: str, *, weights: bool = True
) -> None:
    """Raise UsageError if the model or the dataset does not exist, or is larger than the memory.

    If `weights` is False, the folder of a Hugging Face model needs no weight files. This is used
    for trained runs, which have their weights in checkpoints.
    """
    check_numbers(recipe)
    check_model(recipe, weights=weights)
    _check_dataset(recipe)
    if device == "cpu":
        _check_memory(recipe, layout, rank_batch)


def check_sizes(recipe: Recipe, sizes: dict[str, int], dataset: str) -> None:
    """Raise UsageError if a size of the model differs from the size that the dataset determines.

    sizes: maps the name of a field of the architecture to the size in the dataset. A text model may
    have a larger vocabulary and a longer context than the dataset.
    """
    for name, size in sizes.items():
        value = getattr(recipe.architecture, name, size)
        larger = name in ("vocab_size", "max_seq_len")
        if value == _built_in_value(recipe.architecture, name) or (value > size and larger):
            continue
        if value != size:
            flag = f"--{name.replace('_', '-')}"
            cure = f"Leave it out{f', or use {size} or more' if larger else ''}"
            if name == "image_size" and dataset in ("digits", "synthetic"):
                cure = f"Use --pixels {value}"
            if name == "max_seq_len":
                cure = f"Use --seq-len {value}, or --max-seq-len {size} or more"
            raise UsageError(f"{flag} {value} has no effect: dataset {dataset} has {size}. {cure}.")


def check_dataset_sizes(recipe: Recipe) -> None:
    """Call `check_sizes` with the sizes that are known from the dataset's name."""
    check_sizes(recipe, _dataset_sizes(recipe), recipe.data.dataset)


def check_flags_have_effect(
    recipe: Recipe, base: Recipe, benchmark: bool, unused: Mapping[str, str] | None = None
) -> None:
    """Raise UsageError if a value differs from the value in `base` but has no effect.

    unused: further fields without effect, each with the flag that is the reason.
    """
    for name, condition in {**unused_fields(recipe, benchmark), **(unused or {})}.items():
        for section in fields(recipe):
            value, before = (getattr(getattr(r, section.name), name, None) for r in (recipe, base))
            if value != before:
                raise UsageError(
                    f"{flag_of(name, value)} has no effect with {condition}: "
                    f"{leave_out(name, before)}"
                )


def unused_fields(recipe: Recipe, benchmark: bool) -> dict[str, str]:
    """Return the fields that this recipe does not use, each with the flag that is the reason."""
    data, optimization, length = recipe.data, recipe.optimization, recipe.length
    own_model, synthetic = recipe.model not in RECIPES, data.dataset == "synthetic"
    kind = dataset_kind(data.dataset)
    text = isinstance(recipe.architecture, GPTConfig) or recipe.model.startswith("hf:")
    with_dataset = "--benchmark" if benchmark else f"--dataset {data.dataset}"
    unused: dict[str, str] = {}
    if data.dataset not in ("fashion-mnist", "cifar100", "text", "tokens"):
        unused["data_dir"] = with_dataset
    if data.dataset not in ("fashion-mnist", "cifar100"):
        unused["download"] = with_dataset
    if kind in DATASETS:
        unused["collate"] = with_dataset
    if kind not in ("digits", "images") and not (synthetic and not text):
        unused["pixels"] = with_dataset
    if kind not in TEXT_DATASETS and not (synthetic and text):
        unused["seq_len"] = with_dataset
    if own_model:
        # Synthetic samples for your own model have the sizes in the architecture.
        used = ("channels", "classes", "vocab_size") if synthetic else ()
        names = [size.name for size in fields(recipe.architecture) if size.name not in used]
        unused |= dict.fromkeys(names, f"--model {recipe.model}")
    used_options = OPTIMIZERS.get(optimization.optimizer.lower(), ())
    for option in {"momentum", "betas", "weight_decay"}.difference(used_options):
        unused[option] = f"--optimizer {optimization.optimizer}"
    if recipe.task.loss != "cross_entropy":
        unused["padded"] = unused["loss_parallel"] = f"--loss {recipe.task.loss}"
    if optimization.lr_scale == "none":
        unused["lr_batch"] = "--lr-scale none"
    if optimization.schedule == "constant":
        unused["final_lr"] = "--schedule constant"
    if not length.evaluate:
        reason = "--benchmark" if benchmark else "--no-evaluate"
        evaluation = ("evaluate_every", "metric", "keep_best", "patience")
        unused |= dict.fromkeys(evaluation, reason)
    if benchmark:
        unused |= dict.fromkeys(("checkpoint_every", "keep", "epochs"), "--benchmark")
    return unused


def _built_in_value(architecture: Architecture, name: str) -> Any:
    recipes = [r for r in RECIPES.values() if type(r.architecture) is type(architecture)]
    return getattr(recipes[0].architecture, name, None)


def check_cuda_graph(recipe: Recipe, ranks: int, device: str) -> None:
    """Raise UsageError if the step cannot be captured in a graph."""
    requirements = {
        "a CUDA device": device == "cuda",
        "--data-on-device": recipe.data.data_on_device,
        "--precision float32, bf16 or model": recipe.compute.precision
        in ("float32", "bf16", "model"),
        "--split even": recipe.batching.split == "even",
        "targets without padding": not recipe.data.padded,
        "--optimizer sgd or adamw": recipe.optimization.optimizer.lower() in ("sgd", "adamw"),
        "one rank": ranks == 1,
    }
    for requirement, met in requirements.items():
        if recipe.compute.cuda_graph and not met:
            raise UsageError(f"--cuda-graph needs {requirement}. Otherwise remove --cuda-graph.")


# -- model and dataset: names, functions, files ----------------------------------------------------


def check_model(recipe: Recipe, *, weights: bool = True) -> None:
    """Raise UsageError if the model does not exist, or if it does not fit the recipe."""
    model = recipe.model
    if model == "own":
        raise UsageError("--recipe own needs your model: add --model package.module:function")
    if model == "hf":
        raise UsageError(
            "--recipe hf needs a folder that save_pretrained wrote: add --model hf:FOLDER"
        )
    from_library = split_source(model) is not None
    if from_library or recipe.lora is not None or recipe.init_from is not None:
        from tutti.train.pretrained_check import check_pretrained

        check_pretrained(recipe, weights)
    if from_library:
        return
    if model not in RECIPES:
        check_function(model, "--model", tuple(RECIPES))
    elif type(RECIPES[model].architecture) is not type(recipe.architecture):
        raise UsageError(
            f"--model {model} does not fit the recipe: use --recipe {model}, with --dataset and "
            "other flags"
        )
    elif model == "gpt" and dataset_kind(recipe.data.dataset) in IMAGE_DATASETS:
        raise UsageError(
            f"--model gpt needs text, but dataset {recipe.data.dataset} has no text: use --dataset "
            "stdlib"
        )
    elif model != "gpt" and dataset_kind(recipe.data.dataset) in TEXT_DATASETS:
        raise UsageError(
            f"--model {model} needs images, but dataset {recipe.data.dataset} has text: use "
            "another --dataset"
        )


def _check_dataset(recipe: Recipe) -> None:
    data = recipe.data
    synthetic_text = recipe.model.startswith("hf:")
    if not data.dataset or (
        data.dataset == "synthetic"
        and isinstance(recipe.architecture, OwnModelConfig)
        and not synthetic_text
    ):
        own = "package.module:function, which returns (train, test)"
        cure = f"text:FILE, jsonl:FILE, or {own}" if synthetic_text else own
        raise UsageError(f"--model {recipe.model} needs data: add --dataset {cure}")
    kind, path = dataset_kind(data.dataset), dataset_path(data.dataset, data.data_dir)
    if kind not in DATASETS:
        check_function(data.dataset, "--dataset", DATASETS)
    if data.collate is not None:
        check_function(data.collate, "--collate", ())
    if kind == data.dataset and kind in ("jsonl", "parquet", "images"):
        raise UsageError(f"--dataset {kind} needs a path: write --dataset {kind}:PATH")
    try:
        check_files(kind, path, data.download)
    except DataError as error:
        raise UsageError(f"--dataset {data.dataset}: {error}") from None
    except OSError as error:
        reason = f"{error.strerror}. Check the path and its permissions."
        raise UsageError(f"--data-dir {data.data_dir}: {reason}") from None
    if data.dataset == "digits" and data.pixels < 8:
        raise UsageError(f"--pixels must be at least 8 for digits, got {data.pixels}")
    if data.workers and data.data_on_device:
        raise UsageError(
            f"--workers {data.workers} has no effect with --data-on-device: leave out one of them"
        )


def metric_of(recipe: Recipe) -> str:
    """Return the metric of a recipe, which by default follows from its loss."""
    default = "accuracy" if recipe.task.loss in ("cross_entropy", "bce") else "none"
    return recipe.task.metric or default


def metric_name(metric: str) -> str | None:
    """Return the name of a metric in metrics and summary.json, without `test_`; None: no metric."""
    return None if metric == "none" else metric.rpartition(":")[2]


def _check_task(recipe: Recipe, layout: Layout) -> None:
    loss, metric, dataset = recipe.task.loss, metric_of(recipe), recipe.data.dataset
    if loss not in LOSSES:
        check_function(loss, "--loss", LOSSES)
    if metric not in METRICS:
        check_function(metric, "--metric", METRICS)
    length = recipe.length
    if length.keep_best is not None:
        from tutti.train.best_score import parse_keep_best

        parse_keep_best(length.keep_best, metric_name(metric))
    elif length.patience is not None:
        raise UsageError(
            f"--patience {length.patience} needs a score that must improve: add --keep-best loss"
        )
    if loss in ("mse", "bce") and dataset_kind(dataset) in DATASETS:
        raise UsageError(
            f"--loss {loss} needs targets that are numbers, but dataset {dataset} has class "
            "numbers: use --loss cross_entropy, or your own --dataset"
        )
    if loss == "model" and dataset_kind(dataset) in DATASETS:
        raise UsageError(
            f"--loss model needs a dataset whose targets are the labels of the model, but dataset "
            f"{dataset} has targets for --loss cross_entropy: use that loss, or your own --dataset"
        )
    if loss == "model" and layout.pp > 1:
        raise UsageError(
            f"--loss model: in layout {layout}, only the last stage has outputs, and the model's "
            "own forward never runs: use dp, shard or tp instead of pp, or another --loss"
        )
    fitting = {
        "model": ("none",),
        "cross_entropy": ("accuracy", "none"),
        "mse": ("mse", "mae", "none"),
        "bce": ("accuracy", "mse", "mae", "none"),
    }
    if metric in METRICS and loss in fitting and metric not in fitting[loss]:
        raise UsageError(
            f"--metric {metric} does not fit --loss {loss}: use {', '.join(fitting[loss])} or "
            "package.module:function"
        )


def _check_optimizer(recipe: Recipe, layout: Layout) -> None:
    optimizer = recipe.optimization.optimizer
    if (reason := _OTHER_OPTIMIZERS.get(optimizer.lower())) is not None:
        raise UsageError(
            f"--optimizer {optimizer} does not fit a training step: {reason}. Use --optimizer "
            f"{', '.join(OPTIMIZERS)} or package.module:function"
        )
    if optimizer.lower() not in OPTIMIZERS:
        check_function(optimizer, "--optimizer", tuple(OPTIMIZERS))
    if optimizer.lower() in ("adafactor", "rprop") and not layout.only_replicas:
        raise UsageError(
            f"--optimizer {optimizer} of torch needs whole parameters, but layout {layout} splits "
            f"them: use --layout dp{layout.size} or another optimizer"
        )


def _dataset_sizes(recipe: Recipe) -> dict[str, int]:
    """Return the sizes that the dataset determines, if they are known from the dataset's name."""
    data = recipe.data
    if recipe.model not in RECIPES:
        return {}
    if isinstance(recipe.architecture, GPTConfig):
        kind = dataset_kind(data.dataset)
        sizes = {"vocab_size": BYTE_VOCABULARY_SIZE} if kind in _BYTE_DATASETS else {}
        known = kind in (*TEXT_DATASETS, "synthetic")
        return sizes | ({"max_seq_len": data.seq_len} if known else {})
    if data.dataset == "synthetic":
        return {"image_size": data.pixels}
    if data.dataset not in IMAGE_SIZES:
        return {}
    classes, (channels, pixels, _) = IMAGE_SIZES[data.dataset]
    pixels = data.pixels if data.dataset == "digits" else pixels
    return {"classes": classes, "channels": channels, "image_size": pixels}


def check_function(path: str, flag: str, known: tuple[str, ...]) -> None:
    """Raise UsageError if `package.module:function` certainly does not exist. Imports nothing."""
    module, colon, name = path.partition(":")
    if not colon:
        hint = did_you_mean(path, known)
        raise UsageError(
            f"{flag} {path}: {hint} Write your own function as package.module:function"
        )
    search_current_directory()
    spec, package = None, ""
    for part in module.split("."):
        locations = spec.submodule_search_locations if spec else None
        package = f"{package}.{part}".lstrip(".")
        try:
            if "." not in package:
                spec = importlib.util.find_spec(package)
            else:  # unlike importlib's find_spec, this does not import the parent packages
                spec = PathFinder.find_spec(package, locations) if locations else None
        except ValueError:  # an empty name, or a module without a spec, such as __main__
            spec = None
        if spec is None:
            raise UsageError(
                f"{flag} {path}: No module named {package!r}: run the command in the directory of "
                "the module"
            )
    assert spec is not None
    source = Path(spec.origin or "")
    if source.suffix != ".py":
        return
    text = source.read_bytes()
    try:
        compile(text, str(source), "exec")
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{flag} {path}: {source}: {error}") from None
    # Only a name that does not occur in the file at all is certainly missing.
    defined = re.search(rb"\b" + re.escape(name.encode()) + rb"\b", text) if name else None
    if not defined and not re.search(rb"import \*|__getattr__", text):
        raise UsageError(f"{flag} {path}: {module} has no {name}: check the name")


def search_current_directory() -> None:
    """Let Python find modules in the current directory, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


# -- memory ----------------------------------------------------------------------------------------


def _check_memory(recipe: Recipe, layout: Layout, rank_batch: int) -> None:
    """Refuse parameters or inputs that alone are larger than the memory of this machine."""
    data, config = recipe.data, recipe.architecture
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needs: dict[str, int] = {}  # description → bytes (4 per parameter or pixel, 8 per token)
    if recipe.model in RECIPES:
        needs["the parameters, which the model's sizes determine,"] = (
            4 * _min_parameters(config, data.pixels) * layout.dp
        )
    kind = dataset_kind(data.dataset)
    if kind in (*TEXT_DATASETS, "synthetic") and isinstance(config, GPTConfig):
        needs[f"a batch of {rank_batch} × --seq-len {data.seq_len}"] = 8 * rank_batch * data.seq_len
    elif data.dataset in ("digits", "synthetic") and not isinstance(
        config, GPTConfig | OwnModelConfig
    ):
        digits = data.dataset == "digits"
        count, channels = (1797, 1) if digits else (rank_batch, config.channels)
        described = f"{count} images of {channels} × --pixels {data.pixels}²"
        needs[described] = 4 * count * channels * data.pixels**2
    for what, size in needs.items():
        if size > memory:
            raise UsageError(
                f"{what} need {size / 1e9:,.0f} GB, but this machine has {memory / 1e9:,.0f} GB: "
                "reduce these sizes"
            )


def _min_parameters(config: Architecture, pixels: int) -> int:
    """Return a lower bound of the number of parameters; for a GPT, it is the exact number."""
    if isinstance(config, GPTConfig):
        return config.parameters()
    if isinstance(config, LeNetConfig):
        hidden = 128 * 50 * LeNetConfig(image_size=max(4, pixels)).feature_size ** 2
        return hidden + 128 * config.classes + 500 * config.channels
    if isinstance(config, WideResNetConfig):  # the 3 × 3 convolutions of the last stage
        width = 64 * config.width
        return 9 * width**2 * config.blocks_per_stage + width * config.classes
    if isinstance(config, OwnModelConfig):
        return 0
    return 1280 * config.classes + 24 * 9 * config.channels


# -- layout against model --------------------------------------------------------------------------


def _check_layout(recipe: Recipe, layout: Layout, microbatches: int) -> None:
    """Check that tp divides the sizes of a built-in model, and that the model has enough layers.

    A user's own model is checked after it is built.
    """
    parallel, config = recipe.parallel, recipe.architecture
    if layout.pp > 1:
        schedule = parallel.pipeline_schedule
        check_techniques(schedule, recipe.compute.compile, recipe.compute.checkpoint_activations)
        check_microbatches(schedule, layout.pp, microbatches)
    if recipe.model.startswith("hf:"):
        from tutti.train.pretrained_check import check_hugging_face_layout

        check_hugging_face_layout(recipe, layout)
    if recipe.model not in RECIPES or (layout.tp == 1 and layout.pp == 1):
        return
    if not isinstance(config, GPTConfig):
        if layout.tp == 1 and isinstance(config, WideResNetConfig):
            return  # pp cuts a WideResNet between its blocks
        axis = "tp" if layout.tp > 1 else "pp"
        reason = "has no layers that tp can split" if axis == "tp" else "cannot be cut into stages"
        raise UsageError(
            f"layout {layout}: {recipe.model} {reason}: use dp or shard instead of {axis}"
        )
    if layout.tp > 1:
        sizes = _dataset_sizes(recipe)
        check_divides(layout.tp, config.heads, "heads")
        check_divides(layout.tp, config.key_value_heads, "key and value heads (--kv-heads)")
        check_divides(layout.tp, config.hidden, "hidden values of the MLP (--mlp-dim)")
        # The vocabulary of token files is not checked, because it is not known yet.
        if dataset_kind(recipe.data.dataset) in (*_BYTE_DATASETS, "synthetic"):
            vocabulary = max(config.vocab_size, sizes.get("vocab_size", 0))
            check_divides(layout.tp, vocabulary, "tokens of the vocabulary (--vocab-size)")
        if parallel.sequence_parallel and "max_seq_len" in sizes:
            check_sequence(layout.tp, recipe.data.seq_len)
    if layout.pp > 1:
        counted = f"--layers {config.layers}, the embedding, the final norm and the head"
        check_stages(config.layers + 3, layout.pp, parallel.virtual_stages, counted)
