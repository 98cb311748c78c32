"""From paths to what is there: runs, scalings, result files, and notes about what is not.

A path that was named must exist and be something of ours; what is missing or damaged inside a run
directory becomes a note, and the rest is shown.
"""

import json
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.profile.trace_file import is_merged
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.profile.explain import Explanation

_RUN_FILES = ("recipe.toml", "summary.json", "environment.json", "metrics", "traces")
ACCEPTED = (
    "a run directory of `tutti train`, a folder of `tutti profile` or `tutti scale`, "
    "or a file that --json wrote"
)
# A trace begins with one of these; its events may be gigabytes, so they are not read to find out.
_TRACE = re.compile(r'"(traceEvents|schemaVersion|deviceProperties)"')


@dataclass
class Source(ABC):
    """Something that a page shows, by a name that nothing else on it has."""

    name: str
    path: Path

    @property
    def environment(self) -> dict[str, Any] | None:
        """What it was measured on, as it says; never the machine that reports."""
        found = (each.get("environment") for each in self._told())
        return next((each for each in found if isinstance(each, dict)), None)

    @property
    def command(self) -> str | None:
        """What made it."""
        found = (each.get("command") for each in self._told())
        return next((" ".join(map(str, each)) for each in found if isinstance(each, list)), None)

    @abstractmethod
    def _told(self) -> Sequence[dict[str, Any]]:
        """The files of it that may say so."""


@dataclass
class Run(Source):
    """One training, or one program that was profiled. What it does not have is empty."""

    recipe: dict[str, Any] = field(default_factory=dict)
    """Flat: `optimization.lr`."""
    summary: dict[str, Any] = field(default_factory=dict)
    started: dict[str, Any] = field(default_factory=dict)
    """environment.json: command, environment, world, git."""
    metrics: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """By rank."""
    profile: dict[str, Any] | None = None
    explanation: "Explanation | None" = None
    """None where only the JSON of a profile is there: it has no intervals."""
    in_detail: bool = True
    """Of a scaling, only the largest runs are shown step by step."""

    def _told(self) -> Sequence[dict[str, Any]]:
        return self.started, self.summary, self.profile or {}


@dataclass
class Result(Source):
    """A JSON file that a command wrote."""

    schema: str
    """Without its version: tutti.bench.collectives."""
    content: dict[str, Any]

    def _told(self) -> Sequence[dict[str, Any]]:
        return (self.content,)


@dataclass
class Material:
    """All that a page is made of."""

    title: str = "report"
    runs: list[Run] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def sources(self) -> list[Source]:
        """Runs, then results."""
        return [*self.runs, *self.results]

    @property
    def profiled(self) -> list[Run]:
        """The runs whose steps are shown."""
        return [run for run in self.runs if run.profile is not None and run.in_detail]

    def of(self, schema: str) -> list[Result]:
        """The results of one command."""
        return [each for each in self.results if each.schema == schema]


def collect(paths: Sequence[Path]) -> Material:
    """Read everything; paths that hold nothing of ours are refused."""
    names = [path.resolve().name if path.is_dir() else path.stem for path in paths]
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    material = Material(", ".join(names[:3]) + rest)
    for path in paths:
        before = len(material.sources)
        if path.is_dir():
            _directory(path, material)
        else:
            _file(path, material)
        if len(material.sources) == before:
            raise UsageError(f"{path} holds nothing to report: name {ACCEPTED}")
    _tell_apart(material.sources)
    return material


def _file(path: Path, material: Material) -> None:
    if _is_trace(path):
        material.runs.append(run := Run(path.name.split(".")[0], path))
        _explain(run, [path], material)
        return
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}: name {ACCEPTED}") from None
    result = _result(path, content)
    if result is None:
        raise UsageError(f"{path} has no `schema` of tutti's: name {ACCEPTED}")
    _sort_in(result, material)


def _directory(path: Path, material: Material) -> None:
    found = [each for each in sorted(path.glob("*.json")) if each.name not in _RUN_FILES]
    found = [each for each in found if not is_merged(each)]
    results = []
    for each in found:
        try:
            if not _is_trace(each):
                results.append(_result(each, json.loads(each.read_text())))
        except (OSError, ValueError) as error:
            material.notes.append(f"{each} is left out: {error}")
    traces = [each for each in sorted(path.glob("*.json*")) if _is_trace(each)]
    if any((path / name).exists() for name in _RUN_FILES) or traces:
        material.runs.append(_run(path, material))
    for result in filter(None, results):
        # A profile beside the traces that it was made from says nothing new.
        known = result.schema == "tutti.profile" and (path / "traces").is_dir()
        if not known:
            _sort_in(result, material)
        if result.schema == "tutti.scale":
            _runs_of_scale(path, result.content, material)


def _sort_in(result: Result, material: Material) -> None:
    if result.schema == "tutti.profile":
        material.runs.append(Run(result.name, result.path, profile=result.content))
    elif result.schema == "tutti.train":
        material.runs.append(Run(result.name, result.path, summary=result.content))
    else:
        material.results.append(result)


def _result(path: Path, content: Any) -> Result | None:
    schema = content.get("schema") if isinstance(content, dict) else None
    if not isinstance(schema, str) or not schema.startswith("tutti."):
        return None
    return Result(path.stem, path, schema.partition("/")[0], content)


def _run(path: Path, material: Material) -> Run:
    run = Run(path.resolve().name, path)
    if (path / "recipe.toml").is_file():
        try:
            run.recipe = _flat(tomllib.loads((path / "recipe.toml").read_text()))
        except (OSError, ValueError) as error:
            material.notes.append(f"{path / 'recipe.toml'} is left out: {error}")
    run.summary = _object(path / "summary.json", material)
    run.started = _object(path / "environment.json", material)
    for file in sorted((path / "metrics").glob("rank*.jsonl")):
        if number := re.fullmatch(r"rank(\d+)", file.stem):
            run.metrics[int(number[1])] = _lines(file, material)
    try:
        from tutti.profile.explain import trace_files

        files = trace_files(path) if (path / "traces").is_dir() else []
    except UsageError:
        files = []
    files = files or [each for each in sorted(path.glob("*.json*")) if _is_trace(each)]
    if files:
        _explain(run, files, material)
    return run


def _runs_of_scale(path: Path, content: dict[str, Any], material: Material) -> None:
    """Of each number of ranks (and flag of a sweep) the run that its row explains: repeats differ
    by noise, which scale.json has. Where no row names one, the first.
    """
    rows = [*(content.get("rows") or []), *(content.get("sweep") or [])]
    explained = {Path(row["folder"]).name for row in rows if row.get("folder")}
    found: dict[tuple[str, int], list[tuple[bool, int, Path]]] = {}
    for folder in path.glob("*ranks*-repeat*"):
        if name := re.fullmatch(r"(.*)ranks(\d+)-repeat(\d+)", folder.name):
            place = (folder.name not in explained, int(name[3]), folder)
            found.setdefault((name[1], int(name[2])), []).append(place)
    for flags, ranks in sorted(found):
        run = _run(min(found[flags, ranks])[-1], material)
        run.in_detail = ranks == max(size for other, size in found if other == flags)
        material.runs.append(run)


def _explain(run: Run, files: Sequence[Path], material: Material) -> None:
    from tutti.profile.explain import explain

    try:
        run.explanation = explain(files)
        run.profile = run.explanation.rows()
    except (UsageError, ValueError, OSError) as error:
        material.notes.append(f"{run.name}: {error}")


def _object(path: Path, material: Material) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        material.notes.append(f"{path} is left out: {error}")
        return {}
    return content if isinstance(content, dict) else {}


def _lines(path: Path, material: Material) -> list[dict[str, Any]]:
    rows, damaged = [], 0
    with path.open(errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
                rows += [row] if isinstance(row.get("step"), int) else []
            except (ValueError, AttributeError):
                damaged += 1
    if damaged:
        material.notes.append(f"{path}: {damaged} lines are damaged and left out")
    return rows


def _is_trace(path: Path) -> bool:
    """By its beginning; gzipped files are nothing else. One of all ranks together is none."""
    if path.name.startswith(".") or not path.is_file() or is_merged(path):
        return False
    with path.open("rb") as file:
        head = file.read(4096)
    if head[:2] == b"\x1f\x8b":
        return True
    text = head.decode(errors="replace")
    return '"schema": "tutti.' not in text and _TRACE.search(text) is not None


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= (
            _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
        )
    return found


def _tell_apart(named: Sequence[Source]) -> None:
    """Two of one name are told apart by the folders that they are in."""
    names = [each.name for each in named]
    for each in named:
        if names.count(each.name) > 1:
            each.name = f"{each.path.resolve().parent.name}/{each.name}"
    for number, each in enumerate(named):
        if [one.name for one in named].count(each.name) > 1:
            each.name = f"{each.name} ({number + 1})"
