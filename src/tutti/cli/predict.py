"""tutti predict: what a trained model says about a data set, or after a prompt."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.flags import parse
from tutti.cli.mistakes import told_once
from tutti.cli.results import check_writable, write_json
from tutti.world.errors import UsageError
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.parallel.layout import Layout
    from tutti.predict.saved_run import SavedRun
    from tutti.train.checkpoint import Loaded
    from tutti.world.world import World

_FOR_DATA = ("split", "dataset", "data_dir", "limit")
_FOR_PROMPTS = ("tokens", "temperature", "top_k", "seed")


@dataclass(frozen=True)
class Predict:
    """Predict a data set, or go on with prompts: tutti predict --run runs/gpt --prompt "def "

    The checkpoint of a run speaks, on any number of ranks and in any layout, always the same. Of a
    data set, every sample becomes a line of JSON in --out, in order. Texts are printed.
    """

    run: Path
    """The run directory: the --out of a tutti train."""
    step: int | None = None
    """The step of the checkpoint (default: the last good one)."""
    split: Literal["test", "train"] = "test"
    """Which part of the data set."""
    dataset: str | None = None
    """Another data set than the run's, by name or as package.module:function."""
    data_dir: Path | None = None
    """Another place of the data than the run's."""
    limit: int | None = None
    """Only the first so many samples."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text for a gpt to go on with; may be given several times."""
    prompts: Path | None = None
    """A file with a prompt on each line."""
    tokens: int = 200
    """How many tokens to add to each prompt."""
    temperature: float = 0.8
    """Logits are divided by it before one is drawn; 0: always the likeliest token."""
    top_k: int = 40
    """Draw among the so many likeliest tokens; 0: among all."""
    seed: int = 0
    """Seed of the draws."""
    batch: int | None = None
    """Samples (default: as in training) or prompts (default: 1) at a time on each rank."""
    precision: Literal["float32", "bf16", "fp16", "float64"] | None = None
    """Type to compute in (default: as in training; texts: without bf16 and fp16)."""
    out: Path | None = None
    """The file of results (default: RUN/predictions-SPLIT.jsonl; of texts: none)."""
    json: Path | None = None
    """Write score, environment and command to this file, too."""
    layout: str | None = None
    """Axes and their ranks, such as dp2.tp2 (default: a replica on each rank)."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Start this many local ranks, unless a launcher already did."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute."""
    ranks_per_gpu: int = 1
    """How many ranks may share one GPU."""
    start_timeout: float | None = None
    """Seconds for all ranks to arrive (default 300)."""
    timeout: float | None = None
    """Seconds that a collective may take (default 600)."""


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
    return _predict(options)


def _check(options: Predict) -> None:
    """Refuse what needs no world to be seen, and flags that would do nothing."""
    texts = bool(options.prompt) or options.prompts is not None
    for name in _FOR_DATA if texts else _FOR_PROMPTS:
        if getattr(options, name) != getattr(Predict, name):
            other = "with --prompt" if texts else "without --prompt"
            raise UsageError(f"--{name.replace('_', '-')} does nothing {other}: leave it out")
    if texts and options.precision in ("bf16", "fp16"):
        raise UsageError(
            f"--precision {options.precision}: texts are made in float32 or float64, or rounding "
            "would change them from layout to layout: use one of these"
        )
    for name in ("limit", "batch", "tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: use 1 or more")


def _predict(options: Predict) -> int:
    from tutti.parallel.layout import layout_of
    from tutti.predict.saved_run import SavedRun
    from tutti.train.together import together
    from tutti.world.world import init

    with init(
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu if options.ranks_per_gpu > 1 else None,
        start_timeout=options.start_timeout,
        timeout=options.timeout,
    ) as world:
        with told_once(world):
            layout = layout_of(options.layout, world.size)
            run = together(lambda: SavedRun.open(options.run, options.step, options.precision))
            together(lambda: _check_files(options) if world.is_first else None)
            prepare = _texts if options.prompt or options.prompts is not None else _data_set
            work = prepare(options, world, run, layout)
        results = work()
        if options.json is not None and world.is_first:
            write_json(options.json, "tutti.predict/1", {"layout": str(layout), **results})
        return 0


def _data_set(
    options: Predict, world: "World", run: "SavedRun", layout: "Layout"
) -> Callable[[], dict[str, Any]]:
    from tutti.predict.predictor import Predictor, Subject

    subject = Subject(
        *(options.split, options.dataset, options.data_dir, options.limit, options.batch)
    )
    predictor = Predictor(world, run, layout, subject)
    _describe(world, predictor.loaded, predictor.engine.description)
    out = _out(options)
    assert out is not None

    def work() -> dict[str, Any]:
        score = predictor.run(out)
        if world.is_first:
            print(
                f"{options.split} accuracy {100 * score.accuracy:.2f} %, "
                f"{options.split} loss {score.loss:.4f}"
            )
            print(f"{predictor.count:,} predictions are in {out}")
        return {
            "step": predictor.loaded.step,
            "split": options.split,
            "samples": predictor.count,
            "loss": score.loss,
            "accuracy": score.accuracy,
            "count": score.count,
            "out": str(out),
        }

    return work


def _texts(
    options: Predict, world: "World", run: "SavedRun", layout: "Layout"
) -> Callable[[], dict[str, Any]]:
    from tutti.predict.generator import Generator, encode
    from tutti.predict.placing import place_gpt
    from tutti.predict.result_file import ResultFile
    from tutti.predict.sampling import Sampling
    from tutti.train.together import together
    from tutti.world.exchange import gather_json

    def checked() -> list[str]:
        prompts = _prompts(options)
        for number, prompt in enumerate(prompts):
            encode(prompt, number, run.gpt_config())
        return prompts

    sampling = Sampling(options.temperature, options.top_k, options.seed)
    prompts: list[str] = gather_json(together(checked))[0]  # all ranks go on with rank 0's
    config = run.gpt_config()
    decoder, loaded = place_gpt(world, run, layout, config)
    _describe(world, loaded, decoder.engine.description)
    generator = Generator(decoder, config, sampling)

    def work() -> dict[str, Any]:
        with ExitStack() as stack:
            file = None
            if options.out is not None and world.is_first:
                file = stack.enter_context(ResultFile(options.out))
            for completions in generator.run(prompts, options.tokens, options.batch or 1):
                for done in completions:
                    if len(prompts) > 1:
                        print(f"--- prompt {done.index}")
                    print(done.prompt + done.text, flush=True)
                    if file is not None:
                        file.write(f"{json.dumps(asdict(done))}\n".encode())
        return {"step": loaded.step, "prompts": len(prompts), "tokens": options.tokens}

    return work


def _out(options: Predict) -> Path | None:
    """The file of results: texts have one only if it is asked for."""
    if options.out is not None or options.prompt or options.prompts is not None:
        return options.out
    return options.run / f"predictions-{options.split}.jsonl"


def _check_files(options: Predict) -> None:
    check_writable("--out", _out(options))
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
        raise UsageError(f"--prompts {options.prompts} is empty: give a prompt on each line")
    return prompts


def _describe(world: "World", loaded: "Loaded", how: str) -> None:
    if not world.is_first:
        return
    ranks = f"{world.size} rank{'s' * (world.size != 1)} on {world.device.type}"
    print(f"{loaded.path}, {ranks}: {how}", *loaded.notes, sep="\n", file=sys.stderr)
    if world.sharing_note:
        print(f"note: {world.sharing_note}", file=sys.stderr)
