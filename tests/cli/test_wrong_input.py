"""Wrong input, generated from the help of every command: refused with one line, exit code 2.

Each case adds one mistake to a command line that is otherwise right. The line names the flag.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forked_commands import run_all

# A right command line for each command; the mistake is inserted at None.
COMMANDS: dict[str, list[str | None]] = {
    "train": ["--recipe", "lenet", "--steps", "1", None],
    "parity": ["--recipe", "gpt", "--layouts", "dp2", "--ranks", "2", None],
    "predict": ["--run", "missing-run", None],
    "run": [None, "script.py"],
    "world": [None],
    "bench collectives": ["--ranks", "2", None],
    "bench bandwidth": ["--ranks", "2", None],
    "bench symmetric": ["--ranks", "2", None],
    "bench pairs": ["--ranks", "2", None],
    "bench tune": ["--ranks", "2", None],
    "bench compare": ["old.json", "new.json", None],
    "topo": [None],
    "doctor": [None],
    "profile": ["--trace", "traces", None],
    "scale": ["--ranks", "1,2", "--recipe", "gpt", None],
    "report": ["missing-run", None],
    "submit slurm": ["--nodes", "2", None, "--", "python", "x.py"],
    "submit mpi": ["--hosts", "a:2", None, "--", "python", "x.py"],
}
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
        if command == "train":  # no recipe has a size below 0, or one of 10²³
            yield [f"{flag}=-3"]
            yield [f"{flag}={HUGE}"]
    elif value == "FLOAT":
        yield [f"{flag}=abc"]
        if command == "train":
            yield [f"{flag}=nan"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, Any]]]:
    """The flag and the outcome of every case, by command."""
    directory: Path = tmp_path_factory.mktemp("wrong")
    (directory / "script.py").write_text("print('started')\n")
    pages = run_all([[*name.split(), "--help"] for name in COMMANDS], directory)
    cases: list[tuple[str, str, list[str]]] = []
    for (name, command), page in zip(COMMANDS.items(), pages, strict=True):
        for flag, value in flags_of(page["out"]):
            for wrong in mistakes(name, flag, value):
                place = command.index(None)
                arguments = [*command[:place], *wrong, *command[place + 1 :]]
                cases.append((name, flag, [*name.split(), *map(str, arguments)]))
    done = run_all([arguments for _, _, arguments in cases], directory)
    found: dict[str, list[tuple[str, Any]]] = {name: [] for name in COMMANDS}
    for (name, flag, _), outcome in zip(cases, done, strict=True):
        found[name].append((flag, outcome))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_flag_is_refused_with_one_line_that_names_it(
    command: str, outcomes: dict[str, list[tuple[str, Any]]]
) -> None:
    assert outcomes[command]
    for flag, outcome in outcomes[command]:
        lines = outcome["err"].splitlines()
        assert outcome["code"] == 2 and len(lines) == 1, outcome
        assert lines[0].startswith(f"tutti {command.split()[0]}"), outcome
        # A model's size may come from a flag or from a file, so its message has the bare name.
        named = [flag[2:], flag[2:].replace("-", "_"), f"{flag[2:4]}{flag[3:]}"]
        assert any(name in lines[0] for name in named), outcome


def test_the_corpus_is_large(outcomes: dict[str, list[tuple[str, Any]]]) -> None:
    assert sum(map(len, outcomes.values())) >= 300
