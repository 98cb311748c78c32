"""tutti predict: predictions of a trained model for a dataset, or text from prompts."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.flags import parse
from tutti.cli.results import check_writable, join_world, usage_error_on_rank_0, write_json
from tutti.world.errors import UsageError
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.parallel.layout import Layout
    from tutti.predict.trained_run import TrainedRun
    from tutti.train.checkpoint import Loaded
    from tutti.world.world import World

_FOR_DATA = ("split", "dataset", "data_dir", "limit")
_FOR_PROMPTS = ("tokens", "temperature", "top_k", "seed")


@dataclass(frozen=True)
class Predict:
    """Predict a data set, or generate text: tutti predict --run runs/gpt --prompt "def "

    Loads a checkpoint of a run on any number of ranks and in any layout, with the same results.
    Every sample of a data set becomes a line of JSON in --out, in order. Texts are printed.
    """

    run: Path
    """The run directory: the --out of a tutti train."""
    step: int | None = None
    """The step of the checkpoint (default: the newest complete one)."""
    split: Literal["test", "train"] = "test"
    """Which part of the data set."""
    dataset: str | None = None
    """A data set other than the run's, by name or as package.module:function."""
    data_dir: Path | None = None
    """A data directory other than the run's."""
    limit: int | None = None
    """Only the first N samples."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text for a gpt to continue; may be given several times."""
    prompts: Path | None = None
    """A file with one prompt per line."""
    tokens: int = 200
    """Number of tokens to generate for each prompt."""
    temperature: float = 0.8
    """Divides the logits before sampling; 0: always the most likely token."""
    top_k: int = 40
    """Sample from the K most likely tokens; 0: from all."""
    seed: int = 0
    """Seed of the sampling."""
    batch: int | None = None
    """Samples (default: as in training) or prompts (default: 1) per batch on each rank."""
    precision: Literal["float32", "bf16", "fp16", "float64"] | None = None
    """Precision (default: as in training; for texts float32 or float64)."""
    out: Path | None = None
    """File of the results (default: RUN/predictions-SPLIT.jsonl; for texts: none)."""
    json: Path | None = None
    """Also write score, environment and command to this file."""
    layout: str | None = None
    """Axes and their ranks, such as dp2.tp2 (default: a replica on each rank)."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Local ranks to start, unless a launcher already did."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the ranks; auto: CUDA if a GPU is visible."""
    ranks_per_gpu: int = 1
    """Ranks that may share one GPU."""
    start_timeout: float | None = None
    """Seconds for all ranks to start (default 300)."""
    timeout: float | None = None
    """Seconds for a collective (default 600)."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Predict, "tutti predict", arguments)
    _check(options)
    if options.ranks is not None and identify(os.environ).launcher == "python":
        return LocalWorld(
            command=[sys.executable, "-m", "tutti", "predict", *arguments],
            ranks=options.ranks,
            device=options.device,
            ranks_per_gpu=options.ranks_per_gpu,
            show="first",
        ).run()
    if options.out is None and not _is_text(options):
        options = replace(options, out=options.run / f"predictions-{options.split}.jsonl")
    return _predict(options)


def _is_text(options: Predict) -> bool:
    return bool(options.prompt) or options.prompts is not None


def _check(options: Predict) -> None:
    """Raise UsageError for wrong values and for flags without effect, before ranks are started."""
    texts = _is_text(options)
    for name in _FOR_DATA if texts else _FOR_PROMPTS:
        if getattr(options, name) != getattr(Predict, name):
            other = "with --prompt" if texts else "without --prompt"
            raise UsageError(f"--{name.replace('_', '-')} has no effect {other}: leave it out")
    if texts and options.precision in ("bf16", "fp16"):
        raise UsageError(
            f"--precision {options.precision}: texts need float32 or float64, because "
            "with less precision they would differ between layouts: use one of these"
        )
    for name in ("limit", "batch", "tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: use 1 or more")


def _predict(options: Predict) -> int:
    from tutti.parallel.layout import layout_of
    from tutti.predict.trained_run import TrainedRun
    from tutti.train.init import agree

    with join_world(options) as world:
        with usage_error_on_rank_0(world):
            layout = layout_of(options.layout, world.size)
            run = agree(lambda: TrainedRun.open(options.run, options.step, options.precision))
            agree(lambda: _check_files(options) if world.is_first else None)
            prepare = _generate_text if _is_text(options) else _predict_dataset
            execute = prepare(options, world, run, layout)
        results = execute()
        if options.json is not None and world.is_first:
            write_json(options.json, "tutti.predict/1", {"layout": str(layout), **results})
        return 0


def _predict_dataset(
    options: Predict, world: "World", run: "TrainedRun", layout: "Layout"
) -> Callable[[], dict[str, Any]]:
    from tutti.predict.predict_dataset import Predictor

    selected: dict[str, Any] = {name: getattr(options, name) for name in (*_FOR_DATA, "batch")}
    predictor = Predictor(world, run, layout, **selected)
    _describe(world, predictor.loaded, predictor.engine.description)
    out = options.out
    assert out is not None

    def execute() -> dict[str, Any]:
        score = predictor.run(out)
        if world.is_first:
            print(
                f"{options.split} accuracy {100 * score.accuracy:.2f} %, "
                f"{options.split} loss {score.loss:.4f}\n"
                f"{predictor.count:,} predictions are in {out}"
            )
        return {
            "step": predictor.loaded.step,
            "split": options.split,
            "samples": predictor.count,
            **asdict(score),
            "out": str(out),
        }

    return execute


def _generate_text(
    options: Predict, world: "World", run: "TrainedRun", layout: "Layout"
) -> Callable[[], dict[str, Any]]:
    from tutti import comm
    from tutti.predict.generate_text import Sampling, encode, place_gpt
    from tutti.predict.predict_dataset import prediction_file
    from tutti.train.init import agree

    def read_prompts() -> list[str]:
        prompts = _prompts(options)
        for number, prompt in enumerate(prompts):
            encode(prompt, number, run.gpt_config())
        return prompts

    sampling = Sampling(options.temperature, options.top_k, options.seed)
    prompts: list[str] = comm.gather_json(agree(read_prompts))[0]  # all ranks use those of rank 0
    generator, loaded = place_gpt(world, run, layout, run.gpt_config())
    _describe(world, loaded, generator.engine.description)

    def execute() -> dict[str, Any]:
        with ExitStack() as stack:
            write = None
            if options.out is not None and world.is_first:
                write = stack.enter_context(prediction_file(options.out))
            for some in generator.run(prompts, options.tokens, options.batch or 1, sampling):
                for each in some:
                    if len(prompts) > 1:
                        print(f"--- prompt {each.index}")
                    print(each.prompt + each.text, flush=True)
                    if write is not None:
                        write(f"{json.dumps(asdict(each))}\n".encode())
        return {"step": loaded.step, "prompts": len(prompts), "tokens": options.tokens}

    return execute


def _check_files(options: Predict) -> None:
    check_writable("--out", options.out)
    check_writable("--json", options.json)


def _prompts(options: Predict) -> list[str]:
    prompts = list(options.prompt)
    if options.prompts is not None:
        try:
            lines = options.prompts.read_text(errors="surrogateescape").split("\n")
        except OSError as error:
            raise UsageError(f"--prompts {options.prompts}: {error.strerror}") from None
        prompts += lines[:-1] if lines[-1] == "" else lines
    if not prompts:
        raise UsageError(f"--prompts {options.prompts} is empty: write one prompt per line")
    return prompts


def _describe(world: "World", loaded: "Loaded", description: str) -> None:
    if not world.is_first:
        return
    ranks = f"{world.size} rank{'s' * (world.size != 1)} on {world.device.type}"
    print(f"{loaded.path}, {ranks}: {description}", *loaded.notes, sep="\n", file=sys.stderr)
    if world.sharing_note:
        print(f"note: {world.sharing_note}", file=sys.stderr)
