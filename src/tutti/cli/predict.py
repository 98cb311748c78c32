"""tutti predict: predicts a dataset with a trained model, or generates text from prompts."""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.flags import InputFile, InputFolder, OutputFile, check_at_least, check_path, parse
from tutti.cli.results import WorldFlags, print_start, usage_error_on_rank_0, write_json
from tutti.models.config import ModelError, split_source
from tutti.models.lora_layers import check_adapter_files, check_peft, read_adapter
from tutti.models.pretrained import check_source, read_folder
from tutti.parallel.layout import layout_of
from tutti.train.recipe import with_values
from tutti.train.recipe_check import check_model_and_data
from tutti.train.run_directory import check_generates_text, read_trained_run
from tutti.world.errors import UsageError
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.models.lora_layers import AdapterFolder
    from tutti.parallel.layout import Layout
    from tutti.predict.predict_dataset import TrainedRun
    from tutti.train.checkpoint import Loaded
    from tutti.world.world import World

_DATASET_FLAGS = ("split", "dataset", "data_dir", "limit")
_PROMPT_FLAGS = ("tokens", "temperature", "top_k", "seed")


@dataclass(frozen=True, kw_only=True)
class Predict(WorldFlags):
    """Predict a dataset, or generate text: tutti predict --run runs/gpt --prompt "def "

    Loads a checkpoint of a run. The results are the same for any number of ranks and any layout.
    For a dataset, one line of JSON per sample is written to --out, in the order of the dataset.
    For prompts, the generated texts are printed.
    """

    run: InputFolder | None = None
    """Run directory: the --out directory of tutti train."""
    model: str | None = None
    """`hf:FOLDER` generates text with the Hugging Face model in FOLDER, without a run."""
    adapter: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """Directory with a LoRA adapter for --model, which peft or tutti export wrote. The flag may be
    given several times. Then the model is loaded once, and text is generated for all prompts with
    the first adapter, then with the second adapter, and so on."""
    checkpoint: str = "last"
    """Checkpoint to load: `last` (the newest complete checkpoint), `best` (the checkpoint with the
    best score, if the run was trained with --keep-best), or a step number."""
    ema: bool | None = None
    """Use the moving average of the weights (default if the run was trained with --ema). --no-ema
    uses the weights without averaging."""
    split: Literal["test", "train"] = "test"
    """Part of the dataset to predict."""
    dataset: str | None = None
    """Dataset name or `package.module:function` (default: the dataset of the run)."""
    data_dir: Path | None = None
    """Directory of the dataset (default: the directory of the run's dataset)."""
    limit: int | None = None
    """Predict only the first N samples (default: all samples)."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text that a language model continues. The flag may be given several times."""
    prompts: InputFile | None = None
    """File with one prompt per line."""
    tokens: int = 200
    """Number of tokens to generate for each prompt."""
    temperature: float = 0.8
    """Sampling temperature, by which the logits are divided. With 0, the most likely token is
    always selected."""
    top_k: int = 40
    """Sample from the K most likely tokens. 0 samples from all tokens."""
    seed: int = 0
    """Random seed for sampling."""
    batch: int | None = None
    """Batch size. For a dataset: number of samples per rank (default: as in training). For prompts:
    number of prompts that are processed together (default: 1)."""
    precision: Literal["float32", "bf16", "fp16", "float64"] | None = None
    """Precision of the computation (default: as in training). Prompts need `float32` or
    `float64`."""
    out: OutputFile | None = None
    """File for the results (default for a dataset: predictions-SPLIT.jsonl in the run directory).
    By default, generated texts are printed and not written to a file."""
    json: OutputFile | None = None
    """Also write the score, the environment and the command to this JSON file."""
    layout: str | None = None
    """Number of ranks of each mesh axis, such as `dp2.tp2` (default: one replica per rank)."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Number of local ranks to start (default: 1). Ignored under torchrun, srun or mpirun."""

    @property
    def has_prompts(self) -> bool:
        return bool(self.prompt) or self.prompts is not None


def main(arguments: list[str]) -> int:
    options = parse(Predict, "tutti predict", arguments)
    _check(options)
    if options.out is None and not options.has_prompts:
        assert options.run is not None
        out = options.run / f"predictions-{options.split}.jsonl"
        check_path("--out", out, OutputFile)
        options = replace(options, out=out)
    if identify(os.environ).launcher == "python":
        _check_before_start(options, options.ranks or 1)
    if options.ranks is not None and identify(os.environ).launcher == "python":
        return options.start_ranks(["predict", *arguments], options.ranks)
    if identify(os.environ).launcher == "python":
        print_start("predict", 1)
    return _predict(options)


def _check(options: Predict) -> None:
    """Raise UsageError for wrong values and for flags without effect, before ranks are started."""
    for name in _DATASET_FLAGS if options.has_prompts else _PROMPT_FLAGS:
        if getattr(options, name) != getattr(Predict, name):
            flag = f"--{name.replace('_', '-')}"
            condition = "with" if options.has_prompts else "without"
            raise UsageError(f"{flag} has no effect {condition} --prompt. Omit {flag}.")
    if options.has_prompts and options.precision in ("bf16", "fp16"):
        raise UsageError(
            f"--precision must be float32 or float64 for prompts, got {options.precision}. With "
            "this precision, the same prompt would give different texts in different layouts."
        )
    check_at_least(1, options, "limit", "batch", "tokens")
    if (options.run is None) == (options.model is None):
        raise UsageError("give exactly one of --run DIR (a run of tutti train) and --model hf:DIR")
    if options.model is not None and not options.has_prompts:
        raise UsageError(f"--model {options.model} needs a prompt. Add --prompt or --prompts.")
    for flag, given in (
        ("--checkpoint", options.checkpoint != "last"),
        ("--ema", options.ema is not None),
    ):
        if options.model is not None and given:
            raise UsageError(f"{flag} has no effect with --model. Omit {flag}.")
    if (source := split_source(options.model or "")) is not None:
        try:
            check_source(*source)
            for path in options.adapter:
                check_peft("--adapter")
                check_adapter_files(read_adapter(path), read_folder(source[1]))
        except ModelError as error:
            raise UsageError(str(error)) from None
    if options.adapter and options.model is None:
        raise UsageError("--adapter needs --model hf:FOLDER, the base model of the adapter")
    if not 0 <= options.temperature < math.inf:
        raise UsageError(f"--temperature must be at least 0, got {options.temperature:g}")


def _check_before_start(options: Predict, ranks: int) -> None:
    """Run the checks that need neither torch nor ranks. Raise UsageError if a check fails."""
    options.check_ranks(ranks)
    layout = layout_of(options.layout, ranks)
    if options.has_prompts:
        _prompts(options)
    if options.run is None:
        return
    recipe = read_trained_run(options.run, options.checkpoint)
    if options.ema and recipe.optimization.ema is None:
        raise UsageError(f"--ema: {options.run} was trained without --ema. Omit --ema.")
    if options.has_prompts:
        if split_source(recipe.model) is None:
            check_generates_text(recipe, options.run)
        return
    changes = {"dataset": options.dataset, "data_dir": options.data_dir}
    changes = {name: value for name, value in changes.items() if value is not None}
    recipe = with_values(recipe, {"data": changes})
    batch = options.batch or recipe.batching.batch
    check_model_and_data(recipe, layout, batch, options.device_type(), weights=False)


def _predict(options: Predict) -> int:
    from tutti.predict.predict_dataset import TrainedRun
    from tutti.train.init import agree
    from tutti.world.exchange import gather_json

    def open_run() -> TrainedRun:
        if options.model is not None:
            return TrainedRun.of_folder(options.model, options.precision)
        assert options.run is not None
        return TrainedRun.open(options.run, options.checkpoint, options.precision, options.ema)

    with options.join_world() as world:
        with usage_error_on_rank_0(world):
            layout = layout_of(options.layout, world.size)
            run = agree(open_run)
            # If the run is still training, it may save a newer checkpoint while the ranks read the
            # run directory. So all ranks use the step that rank 0 has found.
            run = replace(run, step=gather_json(run.step)[0])
            prepare = _generate_text if options.has_prompts else _predict_dataset
            execute = prepare(options, world, run, layout)
        results = execute()
        if options.json is not None and world.is_first:
            write_json(options.json, "tutti.predict/1", {"layout": str(layout), **results})
        return 0


def _predict_dataset(
    options: Predict, world: "World", run: "TrainedRun", layout: "Layout"
) -> Callable[[], dict[str, Any]]:
    from tutti.predict.predict_dataset import Predictor

    selection: dict[str, Any] = {name: getattr(options, name) for name in _DATASET_FLAGS}
    predictor = Predictor(world, run, layout, batch=options.batch, **selection)
    _describe(world, predictor.loaded, predictor.engine.description)
    out, split = options.out, options.split
    assert out is not None

    def execute() -> dict[str, Any]:
        score = predictor.run(out)
        if world.is_first:
            accuracy = f"{split} {score.describe()}"
            print(f"{accuracy}, {split} loss {score.loss:.4f}")
            print(f"{predictor.count:,} predictions are in {out}")
        counts = {"step": predictor.loaded.step, "split": split, "samples": predictor.count}
        scores = {"loss": score.loss, "accuracy": score.metric, "count": score.count}
        return {**counts, **scores, "out": str(out)}

    return execute


def _generate_text(
    options: Predict, world: "World", run: "TrainedRun", layout: "Layout"
) -> Callable[[], dict[str, Any]]:
    from tutti import comm
    from tutti.predict import generate_text
    from tutti.predict.predict_dataset import prediction_file
    from tutti.predict.switch_adapters import Adapters
    from tutti.train.init import agree, hugging_face_folder

    def read_prompts() -> tuple[generate_text.TextModel, list[str]]:
        folder = hugging_face_folder(run.recipe.model, weights=False)
        text: generate_text.TextModel
        if folder is not None:
            text = generate_text.TokenizerText(folder)
        else:
            text = generate_text.ByteText(run.gpt_config())
        prompts = _prompts(options)
        longest = max(len(text.encode(prompt, number)) for number, prompt in enumerate(prompts))
        if folder is not None and longest + options.tokens > text.max_seq_len:
            raise UsageError(
                f"a prompt of {longest} tokens and --tokens {options.tokens} exceed the model's "
                f"{text.max_seq_len} positions. Use --tokens {text.max_seq_len - longest} or less."
            )
        return text, prompts

    sampling = generate_text.Sampling(options.temperature, options.top_k, options.seed)
    text, own_prompts = agree(read_prompts)
    folders: list[AdapterFolder] = []
    # All ranks use the prompts of rank 0.
    prompts: list[str] = comm.gather_json(own_prompts)[0]
    if isinstance(text, generate_text.TokenizerText):
        folders = agree(lambda: [read_adapter(path) for path in options.adapter])
        generator, loaded = generate_text.place_hugging_face(world, run, layout, text, folders)
    else:
        generator, loaded = generate_text.place_gpt(world, run, layout, run.gpt_config())
    _describe(world, loaded, generator.engine.description)

    def execute() -> dict[str, Any]:
        began, generated = time.perf_counter(), 0
        with ExitStack() as stack:
            write = None
            if options.out is not None and world.is_first:
                write = stack.enter_context(prediction_file(options.out))
            adapters = None
            if options.adapter:
                adapters = stack.enter_context(Adapters(generator.engine, folders))
            for number, adapter in enumerate(options.adapter or [None]):
                if adapters is not None:
                    adapters.activate(number)
                for batch in generator.run(prompts, options.tokens, options.batch or 1, sampling):
                    for completion in batch:
                        generated += completion.tokens
                        if len(prompts) > 1 or len(options.adapter) > 1:
                            of_adapter = f", adapter {adapter}" if adapter else ""
                            print(f"--- prompt {completion.index}{of_adapter}")
                        print(completion.prompt + completion.text, flush=True)
                        if write is not None:
                            row = asdict(completion) | (
                                {"adapter": str(adapter)} if adapter else {}
                            )
                            write(f"{json.dumps(row)}\n".encode())
        rate = generated / (time.perf_counter() - began)
        if world.is_first:
            print(f"{generated} tokens, {rate:,.1f} tokens/s", file=sys.stderr)
        counts = {"step": loaded.step, "prompts": len(prompts), "tokens": options.tokens}
        return {**counts, "generated_tokens": generated, "tokens_per_s": rate}

    return execute


def _prompts(options: Predict) -> list[str]:
    prompts = list(options.prompt)
    if options.prompts is not None:
        try:
            lines = options.prompts.read_text(errors="surrogateescape").split("\n")
        except OSError as error:
            raise UsageError(f"--prompts {options.prompts}: {error.strerror}") from None
        prompts += lines[:-1] if lines[-1] == "" else lines
    if not prompts:
        raise UsageError(f"--prompts {options.prompts} is empty. Write one prompt per line.")
    return prompts


def _describe(world: "World", loaded: "Loaded", description: str) -> None:
    if world.is_first:
        ranks = f"{world.size} rank{'s' * (world.size != 1)} on {world.device.type}"
        notes = [*loaded.notes, *([f"note: {world.sharing_note}"] if world.sharing_note else [])]
        print(f"{loaded.path}, {ranks}: {description}", *notes, sep="\n", file=sys.stderr)
