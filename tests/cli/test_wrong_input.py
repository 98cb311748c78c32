"""Wrong flags and files for every command: refused with one line and exit code 2, before torch.

Each case adds one mistake to a command line that is otherwise right. Wrong flags and wrong output
paths are generated from the help of the commands. The line names the flag or the file.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forked_commands import run_all
from tutti.plan.cluster_spec import named_cluster
from tutti.plan.operator_cost import default_rates, rates_row

# A right command line for each command; the mistake is inserted at None.
COMMANDS: dict[str, list[str | None]] = {
    "train": ["--recipe", "lenet", "--steps", "1", None],
    "parity": ["--recipe", "gpt", "--layouts", "dp2", "--ranks", "2", None],
    "predict": ["--run", "run", None],
    "export": ["--run", "run", "--to", "to", None],
    "run": [None, "script.py"],
    "why": ["job", None],
    "watch": ["job", None],
    "world": [None],
    "bench collectives": ["--ranks", "2", None],
    "bench bandwidth": ["--ranks", "2", None],
    "bench symmetric": ["--ranks", "2", None],
    "bench pairs": ["--ranks", "2", None],
    "bench tune": ["--ranks", "2", None],
    "bench compare": ["result.json", "result.json", None],
    "topo": [None],
    "doctor": [None],
    "profile": ["--trace", "run", None],
    "scale": ["--ranks", "1,2", "--recipe", "gpt", None],
    "plan": ["--recipe", "gpt", "--gpus", "2xH100", None],
    "tune": ["--recipe", "gpt", None],
    "report": ["result.json", None],
    "submit slurm": ["--nodes", "2", None, "--", "python", "x.py"],
    "submit mpi": ["--hosts", "a:2", None, "--", "python", "x.py"],
}
# Commands that also take the flags of tutti train, which their help does not list.
TRAIN_FLAGS = ("scale", "plan", "tune")
HUGE = "9" * 23


def flags_of(page: str) -> Iterator[tuple[str, str]]:
    """Yield each flag of a help page with the placeholder of its value, or "" for a switch."""
    for line in re.findall(r"(?m)^  (-.*?)(?:  |$)", page):
        names = re.findall(r"(?:^|, )(--[a-z][\w-]*)", line)
        if names and names[0] != "--help":
            yield names[0], line.split(names[-1], 1)[1].strip()


def mistakes(command: str, flag: str, value: str) -> Iterator[list[str]]:
    """Yield arguments that are wrong for a flag, whatever its meaning."""
    if len(flag) % 4 == 0 or command == "report":  # one mechanism: some flags are enough
        yield [f"{flag[:4]}{flag[3:]}", *(["1"] if value else [])]
    if not value:
        yield [f"{flag}=maybe"]
    elif value.startswith("{"):
        yield [f"{flag}=nonsense"]
    elif value == "INT":
        yield [f"{flag}=1.5"]
        yield [f"{flag}=-3"]  # no count, size or seed is below 0 or 10²³
        yield [f"{flag}={HUGE}"]
    elif value == "FLOAT":
        yield [f"{flag}=abc"]
        yield [f"{flag}=nan"]


# -- output paths ----------------------------------------------------------------------------------

FOLDER_FLAGS = {
    "--log-dir",
    "--tensorboard",
    "--to",
    "train --out",
    "scale --out",
    "tune --out",
    "profile --out",
    "plan --out",
}
INPUT_FLAGS = {"--trace", "--from", "--run", "--prompts", "--file", "--data-dir"}
INPUT_FLAGS |= {"--machine", "--cluster", "--calibration", "--dumps"}
WRONG_OUTPUTS = ("/proc/x", "script.py/x", "locked/x", "n" * 300)


def wrong_outputs(command: str, flag: str, value: str) -> Iterator[list[str]]:
    if value == "PATH" and flag not in INPUT_FLAGS:
        is_folder = {flag, f"{command} {flag}"} & FOLDER_FLAGS
        for path in (*WRONG_OUTPUTS, "script.py" if is_folder else "folder"):
            yield [flag, path]
        if not is_folder:
            yield [flag, "missing/x"]


# -- input files -----------------------------------------------------------------------------------

RECIPE = 'base = "lenet"\n[optimization]\nlr = 0.1\n'
MACHINE = {"schema": "tutti.machine/1", "machines": [{"host": "a"}]}
TIME = {"p50": 9.0, "p95": 10.0, "p99": 11.0, "min": 8.0, "mean": 9.0, "cv": 0.1}
ROW = {"op": "all_reduce", "backend": "shm", "ranks": 2, "bytes": 4, "time_us": TIME, "wrong": 0}
RESULT = {"schema": "tutti.bench.collectives/1", "rows": [ROW], "world": {"size": 2}}
RULES = '[[expect]]\nop = "all_reduce"\nbusbw_gbs = { min = 1 }\n'
PAIRS = "def one(setting):\n    pass\nPAIRS = [one]\n"
CLUSTER = 'gpus = "16xH100"\nper_node = 8\nmemory_gb = 80.5\n'
CALIBRATION: dict[str, Any] = {
    "schema": "tutti.calibration/1",
    "environment": {"versions": {}, "cpu": "x"},
    "device": "NVIDIA H100 80GB HBM3",
    "ranks": 1,
    "rates": rates_row(default_rates(named_cluster("H100", 1))),
    "collectives": [{"op": "all_reduce", "ranks": 2, "alpha_s": 1e-5, "beta_s_per_byte": 1e-11}],
    "spread": {"memory": 0.1},
    "peak_flops": {},
    "memory_bandwidth": None,
}
PLAN = ["plan", "--recipe", "gpt"]
SUMMARY = {
    "plan": {"rank_batch": 4, "accumulation": 1, "global_batch": 4},
    "memory": {"ranks": [{"rank": 0, "parameters": 4}]},
    "layout": "dp1",
    "world": {"device": "cpu"},
}
TRACE = {"traceEvents": [{"ph": "X", "name": "aten::add", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}


class Input(NamedTuple):
    """A file or a directory that some command lines read, at the place of None."""

    suffix: str
    command_lines: list[list[str | None]]
    right: str | None  # the content of a right file; None: a directory, or any content is right
    wrong: dict[str, str]  # name → content

    @property
    def is_folder(self) -> bool:
        return self.suffix == "/"


def changed(content: dict[str, Any], **values: Any) -> str:
    return json.dumps({**content, **values})


INPUTS = {
    "recipe": Input(
        ".toml",
        [["train", "--recipe", None], ["scale", "--ranks", "1,2", "--recipe", None]],
        RECIPE,
        {
            "unknown base": RECIPE.replace("lenet", "lenot"),
            "no base": "[optimization]\nlr = 0.1\n",
            "unknown key": RECIPE.replace("lr", "learning_rate"),
            "key at the top": 'base = "lenet"\nlr = 0.1\n',
            "wrong type": RECIPE.replace("0.1", '"fast"'),
            "list for a number": RECIPE.replace("0.1", "[1]"),
            "value for a section": 'base = "lenet"\noptimization = 3\n',
            "below the range": RECIPE.replace("0.1", "-1.0"),
            "not finite": RECIPE.replace("0.1", "nan"),
            "too large": f'base = "lenet"\n[batching]\nbatch = {HUGE}\n',
            "no ranks": f"ranks = 0\n{RECIPE}",
            "key twice": f"{RECIPE}lr = 0.2\n",
            "unknown choice": 'base = "lenet"\n[optimization]\nschedule = "zigzag"\n',
        },
    ),
    "machine": Input(
        ".json",
        [["topo", "--from", None], ["doctor", "--from", None], [*PLAN, "--machine", None]],
        json.dumps(MACHINE),
        {
            "another schema": changed(MACHINE, schema="tutti.machine/99"),
            "no schema": json.dumps({"machines": []}),
            "no machine": changed(MACHINE, machines=[]),
            "wrong type": changed(MACHINE, machines=[3]),
            "unknown key": changed(MACHINE, machines=[{"host": "a", "hosst": "b"}]),
            "a list": "[1, 2]",
            "deep": "[" * 100_000,
        },
    ),
    "cluster": Input(
        ".toml",
        [[*PLAN, "--cluster", None]],
        CLUSTER,
        {
            "no GPUs": "per_node = 8\n",
            "unknown GPU": CLUSTER.replace("H100", "H1000"),
            "not a multiple": CLUSTER.replace("16", "17"),
            "GPUs of a wrong type": CLUSTER.replace('"16xH100"', "16"),
            "unknown key": CLUSTER.replace("memory_gb", "memory"),
            "wrong type": CLUSTER.replace("80.5", '"80 GB"'),
            "negative": CLUSTER.replace("80.5", "-80"),
            "not finite": CLUSTER.replace("80.5", "nan"),
            "infinite": CLUSTER.replace("80.5", "inf"),
            "no GPU per node": CLUSTER.replace("8\n", "0\n", 1),
            "key twice": f"{CLUSTER}memory_gb = 80\n",
        },
    ),
    "calibration": Input(
        ".json",
        [
            [*PLAN, "--gpus", "2xH100", "--calibration", None],
            ["plan", "--from", "ended", "--gpus", "2xH100", "--calibration", None],
        ],
        json.dumps(CALIBRATION),
        {
            "another schema": changed(CALIBRATION, schema="tutti.calibration/99"),
            "another device": changed(CALIBRATION, device="cpu"),
            "no rates": changed(CALIBRATION, rates={}),
            "a rate of a wrong type": changed(
                CALIBRATION, rates={**CALIBRATION["rates"], "memory": "fast"}
            ),
            "an unknown rate": changed(CALIBRATION, rates={**CALIBRATION["rates"], "x": 1}),
            "a curve of a wrong type": changed(
                CALIBRATION, rates={**CALIBRATION["rates"], "memory_curve": 3}
            ),
            "collectives of a wrong type": changed(CALIBRATION, collectives=[3]),
            "a spread of a wrong type": changed(CALIBRATION, spread={"memory": "large"}),
            "a bandwidth of a wrong type": changed(CALIBRATION, memory_bandwidth="fast"),
            "versions of a wrong type": changed(CALIBRATION, environment={"versions": 3}),
            "a list": "[1, 2]",
            "deep": "[" * 100_000,
        },
    ),
    "result": Input(
        ".json",
        [
            ["bench", "compare", None, "result.json"],
            ["bench", "compare", "result.json", None],
            ["bench", "collectives", "--ranks", "2", "--expect", None],
            ["report", None],
        ],
        json.dumps(RESULT),
        {
            "a later version": changed(RESULT, schema="tutti.bench.collectives/99"),
            "another schema": changed(RESULT, schema="other/1"),
            "no schema": json.dumps({"rows": []}),
            "schema of a wrong type": changed(RESULT, schema=3),
            "rows of a wrong type": changed(RESULT, rows=3),
            "a row of a wrong type": changed(RESULT, rows=[3]),
            "a time of a wrong type": changed(RESULT, rows=[{**ROW, "time_us": "fast"}]),
            "a p95 of a wrong type": changed(
                RESULT, rows=[{**ROW, "time_us": {**TIME, "p95": "fast"}}]
            ),
            "a time without spread": changed(RESULT, rows=[{**ROW, "time_us": {"p50": 9.0}}]),
            "a list": "[1, 2]",
            "deep": "[" * 100_000,
        },
    ),
    "rules": Input(
        ".toml",
        [["bench", name, "--ranks", "2", "--expect", None] for name in ("collectives", "pairs")],
        RULES,
        {
            "unknown key": RULES.replace("busbw_gbs", "busbw"),
            "unknown value": RULES.replace("all_reduce", "all_produce"),
            "wrong type": RULES.replace("{ min = 1 }", '{ min = "much" }'),
            "no rule": "",
            "unknown section": "[expected]\nop = 1\n",
            "no bound": '[[expect]]\nop = "all_reduce"\n',
        },
    ),
    "pairs": Input(
        ".py",
        [["bench", "pairs", "--ranks", "2", "--file", None]],
        PAIRS,
        {
            "no list": "def one(setting):\n    pass\n",
            "wrong type": "PAIRS = 3\n",
            "raises": "raise KeyError('x')\n",
            "missing module": "import missing_module\n",
            "exits": "raise SystemExit(0)\n",
        },
    ),
    "trace": Input(
        ".json",
        [["profile", "--trace", None], ["report", None]],
        json.dumps(TRACE),
        {
            "events of a wrong type": json.dumps({"traceEvents": 3}),
            "an event of a wrong type": json.dumps({"traceEvents": [3]}),
            "times of a wrong type": json.dumps(
                {"traceEvents": [TRACE["traceEvents"][0] | {"ts": "x"}]}
            ),
            "no events": json.dumps({"traceEvents": []}),
            "gzip without data": "\x1f\x8b",
        },
    ),
    "run": Input(
        "/",
        [
            ["predict", "--run", None],
            ["train", "--resume", "--out", None],
            ["export", "--run", None, "--to", "to"],
            ["plan", "--from", None],
        ],
        None,
        {
            "no recipe": "",
            "a damaged recipe": "recipe.toml:base = ",
            "a recipe of a wrong type": "recipe.toml:base = 3",
            "no checkpoint": f"recipe.toml:{RECIPE}",
        },
    ),
    "summary": Input(
        "/",
        [["plan", "--from", None]],
        None,
        {
            "damaged": "summary.json:{]",
            "a list": "summary.json:[1]",
            "not complete": "summary.json:{}",
            "a layout of a wrong type": f"summary.json:{changed(SUMMARY, layout=3)}",
            "an unknown layout": f"summary.json:{changed(SUMMARY, layout='xp2')}",
            "memory of a wrong type": f"summary.json:{changed(SUMMARY, memory=[3])}",
            "ranks of a wrong type": f"summary.json:{changed(SUMMARY, memory={'ranks': [3]})}",
            "a rate of a wrong type": f"summary.json:{changed(SUMMARY, samples_per_s='x')}",
            "an unknown GPU": f"summary.json:{changed(SUMMARY, world={'device': 'cuda:0'})}",
        },
    ),
    "traces": Input(
        "/",
        [["profile", "--trace", None], ["report", None]],
        None,
        {"no trace": "", "an empty trace": "rank0.json:", "a damaged trace": "rank0.json:{]"},
    ),
    "prompts": Input(".txt", [["predict", "--run", "gpt", "--prompts", None]], "text\n", {}),
    "text": Input(
        ".txt",
        [["train", "--recipe", "gpt", "--dataset", "text", "--data-dir", None]],
        None,
        {"empty": ""},
    ),
    "tokens": Input(
        "/",
        [
            ["train", "--recipe", "gpt", "--dataset", "tokens", "--data-dir", None],
            ["parity", "--ranks", "2", "--dataset", "tokens", "--data-dir", None],
        ],
        None,
        {
            "no description": "train.bin:x",
            "a damaged description": "tokens.json:{",
            "a description of a wrong type": "tokens.json:[1]",
            "an unknown type": 'tokens.json:{"dtype": "float", "vocabulary": 9}',
            "no vocabulary": 'tokens.json:{"dtype": "uint16"}',
            "no tokens": 'tokens.json:{"dtype": "uint16", "vocabulary": 9}',
        },
    ),
    "images": Input(
        "/",
        [
            ["train", "--dataset", "fashion-mnist", "--data-dir", None],
            ["train", "--recipe", "wideresnet", "--dataset", "cifar100", "--data-dir", None],
        ],
        None,
        {"no file": ""},
    ),
    "jsonl": Input(
        ".jsonl",
        [["train", "--recipe", "gpt", "--dataset", "jsonl", "--data-dir", None]],
        None,
        {"empty": ""},
    ),
    "parquet": Input(
        ".parquet",
        [["train", "--recipe", "gpt", "--dataset", "parquet", "--data-dir", None]],
        None,
        {"empty": ""},
    ),
    "classes": Input(
        "/", [["train", "--dataset", "images", "--data-dir", None]], None, {"no class": ""}
    ),
    "script": Input(".py", [["run", "-n", "2", None]], None, {}),
    "module": Input(
        "_module",
        [["train", "--model", None], ["parity", "--ranks", "2", "--dataset", None]],
        None,
        {"no function": "x = 1\n", "a syntax error": "def f(:\n"},
    ),
}
BINARY = bytes(range(256)) * 8


def wrong_paths(kind: str, directory: Path) -> Iterator[tuple[str, str]]:
    """Write wrong files of a kind. Yield (name of the mistake, path relative to `directory`)."""
    suffix, _, right, wrong = item = INPUTS[kind]
    if suffix == "_module":
        for name, text in wrong.items():
            module = f"{kind}_{name.replace(' ', '_')}"
            (directory / f"{module}.py").write_text(text)
            yield name, f"{module}:f"
        (directory / "binary_module.py").write_bytes(BINARY)
        yield "binary", "binary_module:f"
        yield "missing", "missing_module:f"
        yield "no name", "json:"
        return
    end = "" if item.is_folder else suffix
    contents: dict[str, bytes] = {name: text.encode() for name, text in wrong.items()}
    if right is not None:
        contents |= {
            "empty": b"",
            "truncated": right.encode()[: len(right) * 2 // 3],
            "binary": BINARY,
            "no UTF-8": b"\xff" + right.encode(),
        }
        if kind in ("prompts", "trace"):  # any bytes are a prompt; a truncated trace has some steps
            contents = {name: contents[name] for name in contents if name in (*wrong, "empty")}
    for name, content in contents.items():
        path = directory / f"{kind} {name}{end}"
        if item.is_folder:
            path.mkdir()
            inner, colon, text = content.decode().partition(":")
            if colon:
                (path / inner).write_text(text)
            if kind == "summary":
                (path / "recipe.toml").write_text(RECIPE)
        else:
            path.write_bytes(content)
        yield name, path.name
    yield "missing", f"missing {kind}{end}"
    yield "another kind", "script.py" if item.is_folder else "folder"
    loop = directory / f"{kind} loop{end}"
    loop.symlink_to(loop.name)
    yield "loop", loop.name
    yield "long name", "n" * 300 + end
    locked = directory / f"{kind} locked{end}"
    locked.mkdir() if item.is_folder else locked.write_text(right or "x")
    locked.chmod(0)
    yield "locked", locked.name


# -- the cases -------------------------------------------------------------------------------------


class Case(NamedTuple):
    command: str
    named: list[str]  # the line has one of these texts
    arguments: list[str]


def cases_of_flags(pages: dict[str, str]) -> Iterator[Case]:
    for command, line in COMMANDS.items():
        place = line.index(None)
        before, after = ([str(x) for x in part] for part in (line[:place], line[place + 1 :]))
        page = pages[command] + (pages["train"] if command in TRAIN_FLAGS else "")
        for flag, value in dict(flags_of(page)).items():
            # A model's size may come from a flag or from a file, so its message has the bare name.
            named = [flag[2:], flag[2:].replace("-", "_"), f"{flag[2:4]}{flag[3:]}"]
            for wrong in [*mistakes(command, flag, value), *wrong_outputs(command, flag, value)]:
                yield Case(command, named, [*command.split(), *before, *wrong, *after])


def cases_of_files(directory: Path) -> Iterator[Case]:
    for kind, item in INPUTS.items():
        for name, path in wrong_paths(kind, directory):
            for line in item.command_lines:
                if line[0] == "train" and (kind, name) == ("run", "no checkpoint"):
                    continue  # a run that was stopped before its first checkpoint begins again
                arguments = [path if part is None else part for part in line]
                command = " ".join(arguments[: 2 if arguments[0] == "bench" else 1])
                yield Case(command, [path.partition(":")[0]], arguments)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Case, dict[str, Any]]]:
    directory: Path = tmp_path_factory.mktemp("wrong")
    (directory / "script.py").write_text("print('started')\n")
    (directory / "folder").mkdir()
    (directory / "locked").mkdir(mode=0o500)
    (directory / "result.json").write_text(json.dumps(RESULT))
    for name, base in (("run", "lenet"), ("gpt", "gpt")):
        (directory / name / "checkpoints/step-00000001").mkdir(parents=True)
        (directory / name / "recipe.toml").write_text(f'base = "{base}"\n')
    (directory / "ended").mkdir()
    (directory / "ended/recipe.toml").write_text(RECIPE)
    (directory / "ended/summary.json").write_text(json.dumps(SUMMARY))
    names = list(COMMANDS)
    done = run_all([[*name.split(), "--help"] for name in names], directory)
    pages = {name: page["out"] for name, page in zip(names, done, strict=True)}
    cases = [*cases_of_flags(pages), *cases_of_files(directory)]
    done = run_all([case.arguments for case in cases], directory)
    return list(zip(cases, done, strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_input_is_refused_with_one_line_that_names_it(
    command: str, outcomes: list[tuple[Case, dict[str, Any]]]
) -> None:
    of_command = [pair for pair in outcomes if pair[0].command == command]
    assert of_command
    for case, outcome in of_command:
        lines = outcome["err"].splitlines()
        assert outcome["code"] == 2 and len(lines) == 1 and not outcome["out"], outcome
        assert lines[0].startswith(f"tutti {command.split()[0]}: "), outcome
        assert any(name in lines[0] for name in case.named), outcome
        assert not outcome["torch"], outcome


def test_the_corpus_is_large(outcomes: list[tuple[Case, dict[str, Any]]]) -> None:
    assert len(outcomes) >= 900
