"""Find and read the sources of a page: run directories, scaling folders and result files.

Each path on the command line must exist, and must be a file or folder that tutti has written. In a
run directory, files may be missing. A damaged file in a run directory is omitted, and a note on the
page names the file. No page is written if a path has no readable content, or if a file has an
unknown version.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.bench.compare_results import check_types
from tutti.profile.explain import Explanation, explain, trace_files
from tutti.profile.trace_file import is_merged
from tutti.world.errors import UsageError

_RUN_FILES = ("recipe.toml", "summary.json", "environment.json", "metrics", "traces")
ACCEPTED = (
    "a run directory of `tutti train`, a folder of `tutti profile` or `tutti scale`, "
    "or a file written by --json"
)
# A trace has one of these keys in its first bytes. A trace is recognized by these keys, without
# reading its events, because the events may have gigabytes.
_TRACE_KEY = re.compile(r'"(traceEvents|schemaVersion|deviceProperties)"')


@dataclass
class Run:
    """One training run or one profiled program. If a file is missing, its field is empty."""

    name: str
    """A name that is unique on the page."""
    path: Path
    recipe: dict[str, Any] = field(default_factory=dict)
    """The flattened recipe, with keys such as `optimization.lr`."""
    summary: dict[str, Any] = field(default_factory=dict)
    started: dict[str, Any] = field(default_factory=dict)
    """The content of environment.json: command, environment, world and git state."""
    metrics: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """{rank: rows of the rank's metrics file}."""
    profile: dict[str, Any] | None = None
    explanation: Explanation | None = None
    """The analysis of the traces, or None if there are no traces."""
    of_scaling: bool = False
    """Whether the run is a repeat in a folder of `tutti scale`."""
    in_detail: bool = True
    """Whether the page shows the steps of the run. In a scaling folder, this is True only for the
    run with the most ranks."""

    @property
    def documents(self) -> Sequence[dict[str, Any]]:
        """The JSON documents that may contain an environment and a command."""
        return self.started, self.summary, self.profile or {}


@dataclass
class Result:
    """A JSON result file of a tutti command."""

    name: str
    path: Path
    schema: str
    """The schema without its version, such as "tutti.bench.collectives"."""
    content: dict[str, Any]

    @property
    def documents(self) -> Sequence[dict[str, Any]]:
        return (self.content,)


def recorded(source: Run | Result, key: str) -> Any:
    """Return the first recorded value of a key ("environment" or "command"), or None."""
    return next((found for doc in source.documents if (found := doc.get(key))), None)


@dataclass
class ReportSources:
    """The content of a page: runs, results and notes."""

    title: str = "report"
    runs: list[Run] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[Run | Result]:
        return [*self.runs, *self.results]

    @property
    def profiled(self) -> list[Run]:
        """The runs whose steps are shown."""
        return [run for run in self.runs if run.profile is not None and run.in_detail]

    def of_schema(self, *schemas: str) -> list[Result]:
        return [result for name in schemas for result in self.results if result.schema == name]


def read_sources(paths: Sequence[Path]) -> ReportSources:
    """Return the content of all paths. Raise UsageError if a path has nothing to report."""
    names = [path.resolve().name if path.is_dir() else path.stem for path in paths]
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    sources = ReportSources(", ".join(names[:3]) + rest)
    for path in paths:
        count = len(sources.all)
        if path.is_dir():
            _read_directory(path, sources)
        else:
            _read_file(path, sources)
        if len(sources.all) == count:
            raise UsageError(f"{path} has nothing to report. Use {ACCEPTED}.")
    # If several sources have the same name, add the name of the parent folder as a prefix. If the
    # names are still equal, also add a number.
    count_of = Counter(source.name for source in sources.all)
    for source in sources.all:
        if count_of[source.name] > 1:
            source.name = f"{source.path.resolve().parent.name}/{source.name}"
    count_of = Counter(source.name for source in sources.all)
    for number, source in enumerate(sources.all):
        if count_of[source.name] > 1:
            source.name = f"{source.name} ({number + 1})"
    return sources


def _read_file(path: Path, sources: ReportSources) -> None:
    if _is_trace(path):
        sources.runs.append(run := Run(path.name.split(".")[0], path))
        _explain(run, [path])
        return
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}). Use {ACCEPTED}.") from None
    if not _add_result(path, content, sources):
        raise UsageError(f"{path} has no tutti `schema`. Use {ACCEPTED}.")


def _read_directory(path: Path, sources: ReportSources) -> None:
    if any((path / name).exists() for name in _RUN_FILES) or _traces_in(path):
        sources.runs.append(_read_run(path, sources))
    for file in sorted(path.glob("*.json")):
        if file.name in _RUN_FILES or is_merged(file):
            continue
        try:
            if _is_trace(file):
                continue
            content = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            sources.notes.append(f"{file} is omitted: {error}")
            continue
        schema = _add_result(file, content, sources, skip_profile=(path / "traces").is_dir())
        if schema == "tutti.scale":
            _read_scale_runs(path, content, sources)


def _add_result(
    path: Path, content: Any, sources: ReportSources, skip_profile: bool = False
) -> str | None:
    """Add a result file to the sources. Return its schema, or None if the file has no tutti schema.

    With `skip_profile`, the JSON of `tutti profile` is ignored, because the traces are read.
    """
    schema = content.get("schema") if isinstance(content, dict) else None
    if not isinstance(schema, str) or not schema.startswith("tutti."):
        return None
    _check_version(path, content)
    schema = schema.partition("/")[0]
    if schema == "tutti.profile":
        if not skip_profile:
            sources.runs.append(Run(path.stem, path, profile=content))
    elif schema == "tutti.train":
        _check_summary(path, content)
        sources.runs.append(Run(path.stem, path, summary=content))
    else:
        if schema.startswith("tutti.bench."):
            try:
                check_types(content)
            except TypeError as error:
                raise UsageError(wrong_type(path, error)) from None
        sources.results.append(Result(path.stem, path, schema, content))
    return schema


def wrong_type(path: Path | str, error: Exception) -> str:
    """Return the message for a file in which a value has a wrong type."""
    return (
        f"{path}: a value has a wrong type or form ({error}). Run the command that wrote the file "
        "again"
    )


def _read_run(path: Path, sources: ReportSources) -> Run:
    run = Run(path.resolve().name, path)
    run.recipe = flatten(_read_object(path / "recipe.toml", sources, tomllib.loads))
    run.summary = _read_object(path / "summary.json", sources)
    _check_summary(path / "summary.json", run.summary)
    run.started = _read_object(path / "environment.json", sources)
    names = {file: re.fullmatch(r"rank(\d+)", file.stem) for file in (path / "metrics").glob("*")}
    for rank, file in sorted((int(name[1]), file) for file, name in names.items() if name):
        # The page shows all metrics of the first rank, but only the waiting time of all others.
        only = "wait_fraction" if run.metrics else ""
        run.metrics[rank] = _read_metrics(file, sources, only)
    try:
        files = trace_files(path) if (path / "traces").is_dir() else []
    except UsageError:
        files = []
    if files := files or _traces_in(path):
        try:
            _explain(run, files)
        except UsageError as error:
            if not (run.summary or run.recipe or any(run.metrics.values())):
                raise
            sources.notes.append(str(error))
    return run


def _read_scale_runs(path: Path, content: dict[str, Any], sources: ReportSources) -> None:
    """Read one repeat for each combination of swept flags and number of ranks.

    If scale.json names the folder of a repeat, that repeat is read. Otherwise, the first repeat is
    read.
    """
    rows = [*(content.get("rows") or []), *(content.get("sweep") or [])]
    in_rows = {Path(row["folder"]).name for row in rows if row.get("folder")}
    found: dict[tuple[str, int], list[tuple[bool, int, Path]]] = {}
    for folder in path.glob("*ranks*-repeat*"):
        if name := re.fullmatch(r"(.*)ranks(\d+)-repeat(\d+)", folder.name):
            entry = (folder.name not in in_rows, int(name[3]), folder)
            found.setdefault((name[1], int(name[2])), []).append(entry)
    for flags, ranks in sorted(found):
        run = _read_run(min(found[flags, ranks])[-1], sources)
        run.of_scaling = True
        run.in_detail = ranks == max(size for other, size in found if other == flags)
        sources.runs.append(run)


def _explain(run: Run, files: Sequence[Path]) -> None:
    try:
        run.explanation = explain(files)
        run.profile = run.explanation.rows()
    except (UsageError, ValueError, OSError) as error:
        raise UsageError(f"{run.path}: {error}. Record the traces again.") from None


def _check_version(path: Path, content: dict[str, Any]) -> None:
    """Raise UsageError if the schema of the file has a version other than 1."""
    schema, _, version = str(content.get("schema", "")).partition("/")
    if schema.startswith("tutti.") and version not in ("", "1"):
        raise UsageError(
            f"{path}: the schema is {schema}/{version}, but this version of tutti reads only "
            f"{schema}/1. Install the version of tutti that wrote the file"
        )


def _check_summary(path: Path, summary: dict[str, Any]) -> None:
    """Raise UsageError if a value that must be a number has another type."""
    for key in ("steps", "samples", "samples_per_s", "final_loss", "test_loss", "test_accuracy"):
        if not isinstance(value := summary.get(key), int | float | None):
            raise UsageError(f"{path}: {key} has a wrong type: {value!r} is not a number")


def _read_object(
    path: Path, sources: ReportSources, parse: Callable[[str], Any] = json.loads
) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = parse(path.read_text())
    except (OSError, ValueError) as error:
        sources.notes.append(f"{path} is omitted: {error}")
        return {}
    if not isinstance(content, dict):
        sources.notes.append(f"{path} is omitted: its content is not an object")
        return {}
    _check_version(path, content)
    return content


def _read_metrics(path: Path, sources: ReportSources, only: str = "") -> list[dict[str, Any]]:
    """Return the rows of a metrics file. With `only`, return only the rows with this key."""
    rows, damaged = [], 0
    with path.open(errors="replace") as file:
        for line in file:
            if only not in line:  # skip the line before parsing, because parsing is slow
                continue
            try:
                row = json.loads(line)
                numbers = all(isinstance(value, int | float | None) for value in row.values())
                ok = numbers and isinstance(row.get("step"), int)
            except (ValueError, AttributeError):
                ok = False
            if ok:
                rows.append(row)
            else:
                damaged += 1
    if damaged and not rows:
        raise UsageError(
            f"{path}: no line has a `step` and numbers. Use a metrics file of tutti train"
        )
    if damaged:
        sources.notes.append(f"{path}: {damaged} damaged lines are omitted")
    return rows


def _traces_in(path: Path) -> list[Path]:
    return [file for file in sorted(path.glob("*.json*")) if _is_trace(file)]


def _is_trace(path: Path) -> bool:
    """Return whether a file is the trace of one rank, according to its first bytes.

    Every gzip file counts as a trace.
    """
    if path.name.startswith(".") or not path.is_file() or is_merged(path):
        return False
    with path.open("rb") as file:
        head = file.read(4096)
    if head[:2] == b"\x1f\x8b":
        return True
    text = head.decode(errors="replace")
    return '"schema": "tutti.' not in text and _TRACE_KEY.search(text) is not None


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one dictionary with dotted keys such as `time_us.p50`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
