"""What arithmetic, a name or a path can tell is refused in one line, before torch or a rank."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tutti import cli
from tutti.cli import train as command
from tutti.cli.flags import flag_sections
from tutti.data import DataError
from tutti.train.recipe import RECIPES, with_values
from tutti.world.errors import UsageError
from worlds import clean_environment

Refuse = Callable[..., str]


@pytest.fixture
def refuse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Refuse]:
    """A function that runs `tutti train FLAGS` and returns the only line of its output."""

    def train_nothing(*_: object, **__: object) -> int:
        raise AssertionError("the command line was not refused")

    monkeypatch.setattr(command, "_train", train_nothing)
    monkeypatch.setattr(command.Train, "start_ranks", train_nothing)
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(*flags: str) -> str:
        code = cli.run_cli(["train", *flags])
        error = capsys.readouterr().err
        assert code == 2 and error.count("\n") == 1, error
        return error

    yield run
    assert not list(tmp_path.glob("runs")), "a refused command must not write anything"


GPT = ["--recipe", "gpt"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # names
        (["--recipe", "lennet"], "no recipe 'lennet': did you mean lenet?"),
        (["--recipe", ""], "no recipe ''"),
        (["--batchsize", "3"], "no flag --batchsize: did you mean --batch?"),
        (["--learning-rate", "3"], "no flag --learning-rate: did you mean --lr?"),
        (["--dataset", "digit"], "did you mean digits?"),
        (["--model", "lent"], "did you mean lenet?"),
        (["--model", "no.such:thing"], "No module named 'no'"),
        (["--model", "json.such:thing"], "No module named 'json.such'"),
        (["--model", ":thing"], "No module named ''"),
        (["--model", "json:load"], "needs data: add --dataset"),
        (["--recipe", "own", "--dataset", "digits"], "--recipe own needs your model"),
        (["--dataset", "json:no_such"], "json has no no_such"),
        (["--model", "gpt"], "use --recipe gpt"),
        ([*GPT, "--dataset", "digits"], "gpt needs text"),
        (["--dataset", "stdlib"], "lenet needs images"),
        # files and directories
        (["--dataset", "fashion-mnist", "--data-dir", "/nowhere"], "/nowhere"),
        (["--dataset", "cifar100", "--data-dir", "/nowhere"], "/nowhere"),
        ([*GPT, "--dataset", "text", "--data-dir", "/nowhere"], "/nowhere does not exist"),
        ([*GPT, "--dataset", "tokens", "--data-dir", "/etc"], "tokens.json does not exist"),
        (["--resume", "--out", "/nowhere/run"], "no run in /nowhere/run"),
        (["--resume", "--out", "/etc"], "no run in /etc (it has no recipe.toml)"),
        (["--resume"], "Add --out DIR"),
        (["--out", "/etc"], "exists and is not empty: add --resume"),
        (["--out", "/etc/passwd"], "/etc/passwd is a file"),
        (["--out", "/etc/passwd/run"], "/etc/passwd is a file"),
        # layout against ranks and model
        (["--layout", "dp2", "--ranks", "3"], "needs 2 ranks"),
        (["--layout", "dp2", "--ranks", "9" * 23], "--ranks must be at most"),
        (["--layout", f"dp{'9' * 23}"], "--ranks must be at most"),
        ([*GPT, "--layout", "pp8", "--layers", "4"], "pp8 needs 8 layers"),
        ([*GPT, "--layout", "tp3"], "tp3 does not divide the 4 heads"),
        ([*GPT, "--layout", "tp2", "--kv-heads", "1"], "1 key and value heads"),
        ([*GPT, "--layout", "tp2", "--seq-len", "5"], "sequences of 5 tokens"),
        ([*GPT, "--layout", "tp2", "--vocab-size", "257"], "257 tokens of the vocabulary"),
        ([*GPT, "--layout", "pp2", "--accumulation", "1"], "use --accumulation 2"),
        (["--layout", "tp2"], "lenet has no layers that tp can split"),
        (["--layout", "pp2"], "lenet cannot be cut"),
        (["--layout", "shard2", "--bucket-mb", "2"], "--bucket-mb 2.0 is for replicas"),
        (["--engine", "single", "--ranks", "2"], "--engine single needs a world of 1 rank"),
        (["--split", "1,2,3", "--ranks", "2"], "3 shares for 2 ranks"),
        (["--global-batch", "7", "--ranks", "2"], "--global-batch 7 is not divisible by 2 ranks"),
        (["--ranks", "1,2"], "--ranks must be a whole number"),
        (["--lr-sweep", "0.1", "--ranks", "2", "--layout", "dp3"], "needs 3 ranks"),
        # values
        (["--start-timeout", "nan"], "--start-timeout must be seconds above 0"),
        (["--timeout", "-1"], "--timeout must be seconds above 0"),
        (["--pixels", "4"], "--pixels must be at least 8"),
        (["--pixels", "2000000000"], "this machine has"),
        ([*GPT, "--layers", "2000000000"], "this machine has"),
        ([*GPT, "--dataset", "synthetic", "--seq-len", "2000000000"], "--seq-len 2000000000"),
        (["--recipe", "wideresnet", "--dataset", "synthetic", "--width", "1000000"], "GB"),
        (["--compress", "bf16", "--no-overlap"], "--compress bf16"),
        (["--depth", "12", "--recipe", "wideresnet"], "depth must be 6n + 4, got 12"),
        (["--cuda-graph"], "--cuda-graph needs a CUDA device"),
        (["--nvtx"], "--nvtx needs CUDA"),
        # flags that the model, the dataset, the optimizer or another flag makes useless
        (["--classes", "5"], "--classes 5 has no effect: dataset digits has 10"),
        (["--channels", "3"], "--channels 3 has no effect"),
        (["--image-size", "32"], "--pixels 32"),
        ([*GPT, "--vocab-size", "10"], "--vocab-size 10 has no effect: dataset stdlib has 256"),
        ([*GPT, "--max-seq-len", "64"], "--seq-len 64"),
        ([*GPT, "--pixels", "32"], "--pixels 32 has no effect with --dataset stdlib"),
        (["--seq-len", "32"], "--seq-len 32 has no effect with --dataset digits"),
        (["--data-dir", "/etc"], "--data-dir /etc has no effect with --dataset digits"),
        (["--download"], "--download has no effect"),
        (["--recipe", "lenet", "--model", "json:load", "--classes", "5"], "no effect with --model"),
        (["--betas", "0.5", "0.5"], "no effect with --optimizer sgd"),
        (["--betas", "0.5", "0.5", "--optimizer", "RMSprop"], "no effect with --optimizer RMSprop"),
        (["--optimizer", "adem"], "did you mean adam?"),
        (["--optimizer", "LBFGS"], "several times in a step"),
        (["--optimizer", "rprop", "--layout", "shard2"], "use --layout dp2 or another optimizer"),
        (["--loss", "crossentropy"], "did you mean cross_entropy?"),
        (["--loss", "bce"], "has class numbers: use --loss cross_entropy"),
        (["--metric", "mae"], "--metric mae does not fit --loss cross_entropy: use accuracy, none"),
        (["--patience", "3"], "--patience 3 needs a score that must improve: add --keep-best loss"),
        (["--patience", "3", "--no-evaluate"], "--patience 3 has no effect with --no-evaluate"),
        (["--patience", "0", "--keep-best", "loss"], "--patience must be at least 1"),
        (["--keep-best", "loss", "--benchmark"], "--keep-best loss has no effect with --benchmark"),
        (["--keep-best", "f1"], "the evaluation has no f1: use loss or accuracy"),
        (["--keep-best", "low:loss"], "use loss, min:loss or max:loss"),
        (["--keep-best", "accuracy", "--metric", "none"], "has no accuracy: use loss"),
        (["--keep-best", "loads", "--metric", "json:loads"], "use max:loads if larger"),
        (["--ema", "1"], "--ema must be greater than 0 and less than 1, got 1.0"),
        (["--ema", "nan"], "--ema must be a finite number"),
        (["--metric", "none", "--no-evaluate"], "--metric none has no effect with --no-evaluate"),
        (["--collate", "json:loads"], "no effect with --dataset digits"),
        ([*GPT, "--momentum", "0.5"], "--momentum 0.5 has no effect with --optimizer adamw"),
        (["--lr-batch", "32"], "--lr-batch 32 has no effect with --lr-scale none"),
        (["--schedule", "constant", "--final-lr", "0.1"], "no effect with --schedule constant"),
        (["--no-evaluate", "--evaluate-every", "3"], "no effect with --no-evaluate"),
        (["--benchmark", "--keep", "3"], "--keep 3 has no effect with --benchmark"),
        (["--benchmark", "--resume", "--out", "/etc"], "Omit --resume"),
        (["--epochs", "3", "--steps", "3"], "--epochs has no effect with --steps"),
        (["--batch", "3", "--global-batch", "3"], "--batch has no effect with --global-batch"),
        (["--lr-sweep", "0.1", "--lr", "0.1"], "--lr has no effect with --lr-sweep"),
        (["--lr-sweep", "0.1", "--out", "x"], "--out has no effect with --lr-sweep"),
        (["--lr-sweep", "inf"], "positive numbers, got inf"),
    ],
)
def test_a_wrong_command_line_is_refused(flags: list[str], message: str, refuse: Refuse) -> None:
    assert message in refuse(*flags)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_has_limits(recipe: str, refuse: Refuse) -> None:
    """No number makes a huge allocation, an endless loop or a traceback."""
    base = command.Train(settings=RECIPES[recipe])
    sections = dict(flag_sections(command.Train, base))
    # All recipes have the same flags, except for the sizes of their models.
    names = sections if recipe == "gpt" else ("architecture",)
    flags = [flag for name in names for flag in sections.get(name, [])]
    values = {"INT": ["9" * 23, "-3"], "FLOAT": ["nan", "-3", "inf"]}
    for flag in flags:
        kind = flag.usage.split()[-1]
        for value in values.get(kind, []):
            words = [flag.name, *[value] * flag.usage.split().count(kind)]
            assert flag.name.strip("-").replace("-", "_") in refuse(
                "--recipe", recipe, "--dataset", "synthetic", *words
            ).replace("-", "_")


def test_a_flag_overrides_the_other_way_to_set_the_length_or_the_batch(tmp_path: Path) -> None:
    assert RECIPES["gpt"].length.steps is not None
    settings = command.read_flags([*GPT, "--epochs", "2"])[0].settings
    assert (settings.length.steps, settings.length.epochs) == (None, 2)
    (tmp_path / "mine.toml").write_text('base = "lenet"\n[batching]\nglobal_batch = 8\n')
    options, _ = command.read_flags(["--recipe", str(tmp_path / "mine.toml"), "--batch", "4"])
    assert options.settings.batching.global_batch is None


_DATA = {
    "empty": ("torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)", "training set is empty"),
    "floats": (
        "torch.zeros(8, 4), torch.zeros(8)",
        "training set are torch.float32",
    ),
    "dicts": ("[{'x': torch.zeros(4), 'y': 1}] * 8", "expected (inputs, targets)"),
}


@pytest.mark.parametrize("kind", _DATA)
def test_a_dataset_that_cannot_be_trained_on_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tutti train and tutti predict load datasets with the same function."""
    from tutti.train.init import load_dataset

    value, message = _DATA[kind]
    (tmp_path / f"{kind}.py").write_text(
        f"import torch\ndef data():\n    part = {value}\n    return part, part\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = with_values(RECIPES["lenet"], {"data": {"dataset": f"{kind}:data"}})
    with pytest.raises((DataError, UsageError)) as error:
        load_dataset(recipe)
    assert message in str(error.value)
