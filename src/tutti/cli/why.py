"""tutti why: explains a job that hangs or has died."""

import json
import sys
from dataclasses import dataclass

import tyro

from tutti.cli.flags import InputFolder, OutputFile, parse
from tutti.cli.results import write_json
from tutti.measure.terminal import print_line, text_width, wrap_line
from tutti.observe.why import (
    SCHEMA,
    Explanation,
    Snapshot,
    explain,
    explain_job,
    hosts_of,
    job_of,
    take_snapshot,
)
from tutti.world.errors import UsageError


@dataclass(frozen=True)
class Why:
    """Explain a job that hangs or has died: tutti why

        tutti why                          # the newest job of this user on this host
        tutti why 12345                    # the job of a process id
        tutti why runs/mine                # the job of a run directory
        tutti why --hosts n1,n2            # a job on several hosts, through ssh
        tutti why --dumps /tmp/dumps       # files of torch's flight recorder

    Names the rank, the operation and the source line that keep the job waiting. tutti run and tutti
    train record their ranks. For other launchers, set TUTTI_OBSERVE=1, or start the script with
    python -m tutti.observe. The exit code is 0 if the job runs or has ended normally, and 1 if it
    hangs or has died.
    """

    job: tyro.conf.Positional[str | None] = None
    """Job name, process id or run directory (default: the newest job of this user)."""
    hosts: str | None = None
    """Comma-separated hosts to ask, besides this one. For a Slurm job, the hosts of the job are the
    default."""
    via: str | None = None
    """Command that runs another command on a host, with {host} for its name (default: `ssh {host}`,
    or `srun` in the job of Slurm)."""
    dumps: InputFolder | None = None
    """Explain the files that torch's flight recorder wrote into this directory. Their names end
    with the rank."""
    json: OutputFile | None = None
    """Write the explanation to this file."""
    stacks: bool = False
    """Print the Python stack of every rank."""
    jobs: bool = False
    """Print the recorded jobs of this user on this host."""
    hang_after: float = 5.0
    """Seconds without progress after which the job is said to hang."""
    snapshot: bool = False
    """Print the records of this host as JSON. Other hosts use this flag to ask this host."""


def main(arguments: list[str]) -> int:
    options = parse(Why, "tutti why", arguments)
    if options.jobs:
        return _list_jobs()
    if options.dumps is not None:
        for flag in ("job", "hosts", "via"):
            if getattr(options, flag) is not None:
                name = "JOB" if flag == "job" else f"--{flag}"
                raise UsageError(f"{name} has no effect with --dumps. Omit one of them.")
        from tutti.observe.flight_recorder import read_dumps

        dumps = Snapshot(read_dumps(options.dumps))
        explanation = explain(dumps, dumps, 0.0)
        return _show(options, explanation, str(options.dumps))
    folder = job_of(options.job)
    if options.snapshot:
        processes = [] if folder is None else take_snapshot(folder).processes
        print(json.dumps({"processes": [each.to_json() for each in processes]}))
        return 0
    if folder is None:
        what = "there is no recorded job" if options.job is None else f"{options.job} is no job"
        raise UsageError(
            f"{what} of this user on this host. Start the job with tutti run, or set "
            "TUTTI_OBSERVE=1 for its ranks. tutti why --jobs prints the recorded jobs."
        )
    hosts, via = hosts_of(folder, options.hosts, options.via)
    explanation = explain_job(folder, hosts, via, hang_after=options.hang_after)
    return _show(options, explanation, folder.name)


def _show(options: Why, explanation: Explanation, job: str) -> int:
    width = text_width()
    for line in wrap_line(explanation.verdict, width, ""):
        print_line(line)
    for evidence in explanation.evidence:
        for line in wrap_line(f"  {evidence}", width, "    "):
            print_line(line)
    if len(explanation.ranks) > 1 or explanation.kind == "progress":
        print_line("")
        for row in explanation.ranks[:64]:
            state = row["doing"] if row["state"] != "blocked" else f"waits in {row['operation']}"
            place = row["site"] if row["state"] == "blocked" else ""
            text = f"rank {row['rank']}: step {row['step']}, {state}{f' at {place}' * bool(place)}"
            for line in wrap_line(text, width, "    "):
                print_line(line)
            for frame in row["stack"] if options.stacks else ():
                print_line(f"    {frame}")
        if len(explanation.ranks) > 64:
            print_line(f"… {len(explanation.ranks) - 64} more ranks: add --json FILE")
    if options.json is not None:
        write_json(options.json, SCHEMA, {"job": job, **explanation.to_json()})
    return 1 if explanation.hang else 0


def _list_jobs() -> int:
    from tutti.observe import ring_reader

    for folder in ring_reader.jobs():
        ranks = ring_reader.read_job(folder, 0, 0)
        if ranks:
            alive = sum(each.alive for each in ranks if each.worker < 0)
            count = sum(each.worker < 0 for each in ranks)
            state = f"{alive} of {count} ranks run"
            print_line(f"{folder.name}  {state}  {ranks[0].command}")
    if not ring_reader.jobs():
        print("there is no recorded job of this user on this host", file=sys.stderr)
    return 0
