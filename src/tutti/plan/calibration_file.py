"""The file of `tutti plan --calibrate`: rates of a machine, with measurements and versions.

This module does not import torch, so `tutti plan` refuses a wrong file in milliseconds.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tutti.machine.environment import describe_environment
from tutti.machine.hardware_catalogue import accelerator
from tutti.measure.files import write_atomically
from tutti.plan.cluster_spec import Cluster
from tutti.plan.collective_cost import MeasuredCollective
from tutti.plan.operator_cost import Rates, rates_row
from tutti.plan.step_simulation import Calibration
from tutti.world.errors import UsageError

SCHEMA = "tutti.calibration/1"


def write_calibration(
    path: Path, calibration: Calibration, measured: Sequence[dict[str, Any]]
) -> None:
    """Write a calibration with its measurements, the machine and the software versions."""
    content = {
        "schema": SCHEMA,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": describe_environment(),
        "device": calibration.device,
        "ranks": measured[0]["ranks"],
        "rounds": measured[0]["rounds"],
        "rates": rates_row(calibration.rates),
        "collectives": [asdict(each) for each in calibration.collectives],
        "spread": dict(calibration.spread),
        "peak_flops": dict(calibration.peak_flops),
        "memory_bandwidth": calibration.memory_bandwidth,
        "measurements": [
            {"operation": operation, "seconds": seconds, "spread": spread}
            for operation, seconds, spread in zip(
                measured[0]["operations"],
                measured[0]["seconds"],
                measured[0]["spread"],
                strict=True,
            )
        ],
    }
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def read_calibration(path: Path, cluster: Cluster | None = None) -> tuple[Calibration, list[str]]:
    """Return a calibration, and warnings if its software versions, CPU or rank count differ.

    Raises UsageError if the file is not valid, or if `cluster` has a different accelerator.
    """
    cure = f"measure this machine with tutti plan --calibrate {path}"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"--calibration {path}: the file does not exist: {cure}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--calibration {path} cannot be read ({error}): {cure}") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise UsageError(
            f"--calibration {path} has the schema {schema!r}, but this version of tutti reads "
            f"{SCHEMA!r}: {cure}"
        )
    try:
        calibration = Calibration(
            device=str(content["device"]),
            rates=_as_rates(content["rates"]),
            collectives=tuple(
                MeasuredCollective(**{"op": str(row["op"]), **_numbers(row, "op")})
                for row in content["collectives"]
            ),
            spread=tuple(sorted(_numbers(content["spread"]).items())),
            peak_flops=tuple(sorted(_numbers(content["peak_flops"]).items())),
            memory_bandwidth=content["memory_bandwidth"],
        )
        if calibration.memory_bandwidth is not None:
            _numbers({"memory_bandwidth": calibration.memory_bandwidth})
        versions = dict(content["environment"]["versions"])
        ranks = content["ranks"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"--calibration {path} is not complete ({error}): {cure}") from None
    if cluster is not None and not _same_device(calibration.device, cluster):
        raise UsageError(
            f"--calibration {path} was measured on {calibration.device}, but the plan is for "
            f"{cluster.accelerator}: omit --calibration, or measure on {cluster.accelerator}"
        )
    warnings = []
    here = describe_environment()
    for name in ("torch", "tutti"):
        if versions.get(name) != here["versions"].get(name):
            warnings.append(
                f"--calibration {path} was measured with {name} {versions.get(name)}, but "
                f"{here['versions'].get(name)} is installed: {cure}"
            )
    if calibration.device == "cpu":
        if content["environment"].get("cpu") != here["cpu"]:
            warnings.append(
                f"--calibration {path} was measured on {content['environment'].get('cpu')}, but "
                f"this machine has {here['cpu']}: {cure}"
            )
        if cluster is not None and ranks != cluster.per_node:
            warnings.append(
                f"--calibration {path} was measured with {ranks} ranks per host, but the plan has "
                f"{cluster.per_node}. The ranks of a host share its cores and memory bandwidth, so "
                f"the rates are different: measure again with --gpus {cluster.per_node}xcpu"
            )
    return calibration, warnings


def _as_rates(row: dict[str, Any]) -> Rates:
    curves = ("memory_curve", "matmul_curve")
    pairs = {name: tuple((float(x), float(y)) for x, y in row[name]) for name in curves}
    return Rates(**(_numbers(row, *curves) | pairs))


def _numbers(row: dict[str, Any], *others: str) -> dict[str, Any]:
    """Return a row without the keys `others`. Raise ValueError if a value is not a number."""
    values = {name: value for name, value in row.items() if name not in others}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ValueError(f"{name} is {value!r}")
    return values


def _same_device(device: str, cluster: Cluster) -> bool:
    if device == "cpu" or cluster.is_cpu:
        return device == "cpu" and cluster.is_cpu
    spec = accelerator(device)
    return spec is not None and spec is accelerator(cluster.device)
