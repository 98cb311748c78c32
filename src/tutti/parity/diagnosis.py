"""Differences between a layout and the single device, and a diagnosis: their probable cause.

Only the first wrong value of a step is reported, because later errors follow from it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.parallel.layout import Layout
from tutti.parity.tolerances import Tolerance

# The end of a diagnosis that is derived only from differences. `compare` removes this end if the
# one-device checks have found the cause.
WITHOUT_KNOWN_CAUSE = ": the samples or the weights differ"


class Difference(NamedTuple):
    """A tensor a (a gradient, an update or a buffer) compared with the reference's tensor b.

    error: max |a − b| / max |b|, the largest over all ranks that hold the tensor. factor: the
    least-squares factor f, for which f·b is nearest to a. residual: max |a − f·b| / max |b|, the
    error that the factor does not explain. spread: how much the ranks disagree. It is the largest
    minus the smallest factor over the ranks that hold the tensor, or the same difference of the
    residuals if that is larger.
    """

    name: str
    error: float
    factor: float = 1.0
    residual: float = 0.0
    spread: float = 0.0


class Scalar(NamedTuple):
    """A number a (the loss or the norm) compared with the reference's number b."""

    error: float
    factor: float

    @classmethod
    def between(cls, a: float, b: float) -> "Scalar":
        """Return |a − b| / |b| and a / b. The error of a number that is not finite is infinite."""
        if not (math.isfinite(a) and math.isfinite(b)):
            return cls(math.inf, math.nan)
        if b == 0:
            return cls(0.0, 1.0) if a == 0 else cls(math.inf, math.inf)
        return cls(abs(a - b) / abs(b), a / b)


@dataclass(frozen=True)
class StepDifference:
    """The differences of one step, in the order in which the values are computed."""

    loss: Scalar
    gradients: Sequence[Difference]  # after the reduction over ranks, before clipping
    norm: Scalar  # the global norm for clipping
    updates: Sequence[Difference]  # parameters after the step minus the initial parameters
    buffers: Sequence[Difference] = ()  # after the step; training does not read buffers
    own_buffers: Sequence[str] = ()  # not compared, because they depend on a rank's own samples


def wrong(differences: Iterable[Difference], tolerance: float) -> list[Difference]:
    """Return the differences whose error is above the tolerance, or NaN."""
    return [diff for diff in differences if not diff.error <= tolerance]


def worst(differences: Iterable[Difference]) -> Difference:
    return max(differences, key=lambda diff: diff.error if diff.error == diff.error else math.inf)


def merge_ranks(by_rank: Iterable[Iterable[Difference]]) -> list[Difference]:
    """Return the worst difference of each name over all ranks, with the spread between ranks."""
    by_name: dict[str, list[Difference]] = {}
    for diff in chain.from_iterable(by_rank):
        by_name.setdefault(diff.name, []).append(diff)
    merged = []
    for ranks in by_name.values():
        factors = [diff.factor for diff in ranks]
        residuals = [diff.residual for diff in ranks]
        spread = max(max(factors) - min(factors), max(residuals) - min(residuals))
        merged.append(worst(ranks)._replace(spread=spread))
    return merged


def buffers_of_own_samples(
    by_rank: Sequence[tuple[int, Sequence[Difference]]], tolerance: float
) -> list[str]:
    """Return the buffers that differ between data ranks and agree within each data rank."""

    def differing(ranks: Iterable[Sequence[Difference]]) -> list[str]:
        return [diff.name for diff in merge_ranks(ranks) if diff.spread > tolerance]

    within: set[str] = set()
    for data_rank in {data_rank for data_rank, _ in by_rank}:
        within.update(differing(buffers for number, buffers in by_rank if number == data_rank))
    return [name for name in differing(buffers for _, buffers in by_rank) if name not in within]


def compare_tensors(
    name: str, a: Tensor, b: Tensor, min_scale: float, *, finite_only: bool = True
) -> Difference:
    """Compare two tensors. Errors are relative to the larger of max |b| and `min_scale`.

    If b is not finite everywhere, the error is infinite. If `finite_only` is False, b may contain
    infinities and NaN, such as the -inf of a causal mask: the error is infinite only if a does not
    have the same values at the same places.
    """
    finite = b.isfinite()
    if not finite.all():
        equal = torch.allclose(a[~finite], b[~finite], rtol=0, atol=0, equal_nan=True)
        if finite_only or not equal:
            return Difference(name, math.inf)
        a, b = a[finite], b[finite]
    if not b.numel():
        return Difference(name, 0.0)
    scale = max(float(b.abs().max()), min_scale) or 1.0
    squares = float((b * b).sum())
    factor = float((a * b).sum()) / squares if squares else 1.0
    error, residual = (float((a - f * b).abs().max()) / scale for f in (1.0, factor))
    return Difference(name, error, factor, residual)


def differing_ranks(steps: Sequence[tuple[float, float]]) -> str | None:
    """Return a message if a rank computes another loss or gradient norm than rank 0, else None.

    `steps` has the loss and the gradient norm of each rank. All ranks have computed one step from
    the same weights and samples.
    """
    for rank, step in enumerate(steps):
        for what, own, first in zip(("loss", "gradient norm"), step, steps[0], strict=True):
            if not math.isclose(own, first, rel_tol=1e-9):
                return (
                    f"from the same weights and samples, rank {rank} computes a {what} of "
                    f"{own:.9g}, but rank 0 computes {first:.9g}: forward depends on the rank"
                )
    return None


@dataclass(frozen=True)
class Setting:
    """The conditions of a comparison."""

    layout: Layout
    microbatches: int
    samples: Sequence[int]  # number of samples of each step, over all ranks
    roles: Mapping[str, str]  # role of each parameter in the model


def diagnose(steps: Sequence[StepDifference], setting: Setting, tolerance: Tolerance) -> str | None:
    """Return one line about the first error, or None if there is no error."""
    for number, step in enumerate(steps):
        if bad := wrong(step.gradients, tolerance.gradient):
            text = _gradients(step, bad, setting, setting.samples[number], tolerance)
        elif step.loss.error > tolerance.loss:
            text = _loss(step.loss.factor, setting)
        elif step.norm.error > tolerance.loss:
            text = _norm(step.norm.factor, setting)
        elif bad := wrong(step.updates, tolerance.update):
            text = (
                f"gradients and norm agree, but the update of {len(bad)} of {len(step.updates)} "
                f"parameters differs; the worst is {_worst_name(bad, setting)}: check learning "
                "rate, weight decay and the optimizer's state"
            )
        elif bad := wrong(step.buffers, tolerance.buffer):
            text = _buffers(bad, step, tolerance)
        else:
            continue
        if number == 0:
            return text
        count, ranks = setting.samples[number], setting.layout.data_ranks
        when = f"only from step {number + 1} on"
        if count % (ranks * setting.microbatches):
            when += f", whose {count} samples are not divisible by {ranks} data ranks × "
            when += f"{setting.microbatches} microbatches"
        return f"{when}: {text}"
    return None


def _gradients(
    step: StepDifference,
    bad: Sequence[Difference],
    setting: Setting,
    samples: int,
    tolerance: Tolerance,
) -> str:
    total, worst_name = len(step.gradients), _worst_name(bad, setting)
    factor = _common_factor(bad, tolerance)
    # Whether ranks hold different values of the same gradient.
    disagree = any(diff.spread > tolerance.gradient for diff in bad)
    if any(not math.isfinite(diff.error) for diff in bad):
        return f"gradients are missing or not finite, for example the gradient of {worst_name}"
    if len(bad) == total and factor is not None:
        return f"gradients are {_size(factor)}: {_cause(factor, setting)}"
    roles = {setting.roles.get(diff.name, "unknown") for diff in bad}
    if len(bad) < total and len(roles) == 1:
        return _one_role(bad, roles.pop(), factor, disagree, setting)
    differ = (
        f"{len(bad)} of {total} gradients differ" if len(bad) < total else "all gradients differ"
    )
    if disagree:
        axes = _shared_axes(setting.layout)
        return f"{differ} between ranks; the worst is {worst_name}: not summed over {axes}"
    if factor is not None:
        return f"{differ} by a common factor; they are {_size(factor)}: {_cause(factor, setting)}"
    missing = (1 - step.loss.factor) * samples
    loss_differs = step.loss.error > tolerance.loss
    if loss_differs and 0.4 < abs(missing) < 0.1 * samples + 1:
        count = max(1, round(abs(missing)))
        problem = f"{'is' if count == 1 else 'are'} {'missing' if missing > 0 else 'counted twice'}"
        return (
            f"{differ}, no single factor explains the errors, and the loss is "
            f"{step.loss.factor:.4f} × the expected loss: {count} of the step's {samples} samples "
            f"{problem}"
        )
    loss = "and the loss differs" if loss_differs else "but the loss agrees"
    hint = WITHOUT_KNOWN_CAUSE if len(bad) == total and loss_differs else ""
    return (
        f"{differ}, no single factor explains the errors, {loss}{hint}; the worst is {worst_name}"
    )


def _one_role(
    bad: Sequence[Difference], role: str, factor: float | None, disagree: bool, setting: Setting
) -> str:
    total = [*setting.roles.values()].count(role)
    size = "" if factor is None else f", {_size(factor)}"
    if role == "tied embedding":
        problem = "half of its gradient is missing" if factor is None else _size(factor)
        return (
            f"only {bad[0].name}, the tied embedding, is wrong ({problem}): its gradient must "
            "be the sum of the gradients of the embedding and of the head"
        )
    wrong_part = f"only {bad[0].name} ({role}) is wrong{size}"
    if len(bad) > 1:
        wrong_part = f"only {role} parameters are wrong{size}, {len(bad)} of {total}; the worst is "
        wrong_part += worst(bad).name
    if role == "norm" and setting.layout.tp > 1 and (disagree or factor is None):
        return f"{wrong_part}: gradients were not reduced over tp (ranks split the sequence)"
    if disagree:
        axes = _shared_axes(setting.layout)
        return f"{wrong_part}, and ranks disagree: gradients were not summed over {axes}"
    if factor is None:
        return f"{wrong_part}, and no single factor explains the errors"
    return f"{wrong_part}: {_cause(factor, setting)}"


def _loss(factor: float, setting: Setting) -> str:
    causes = list(_equal_sizes(factor, setting))
    text = f"the loss is {_size(factor)}, but all gradients agree"
    if factor > 1 and causes:
        return f"{text}: the factor is {' and '.join(causes)}, so every rank adds the whole loss"
    if causes:
        sizes = " and ".join(causes)
        return f"{text}: the factor is the inverse of {sizes}, so only a part of the loss is summed"
    return f"{text}: the reported loss is not the loss that is minimised"


def _norm(factor: float, setting: Setting) -> str:
    # The norm is the root of a sum of squares over ranks: a sum that is wrong by a factor makes the
    # norm wrong by the root of this factor.
    causes = list(_equal_sizes(factor * factor, setting))
    text = f"gradients agree, but the norm for clipping is {_size(factor)}"
    if causes:
        problem = (
            "every rank counts the same squares" if factor > 1 else "a part of the sum is missing"
        )
        return f"{text}, the root of {' or '.join(causes)}: {problem}"
    axes = [axis for axis in ("pp", "tp", "shard") if setting.layout.axes[axis] > 1]
    over = f": check that the norm is summed over {', '.join(axes)}" if axes else ""
    return f"{text}{over}"


def _buffers(bad: Sequence[Difference], step: StepDifference, tolerance: Tolerance) -> str:
    count = f"{len(bad)} of {len(step.buffers)} buffers differ"
    text = f"gradients and updates agree, but {count}; the worst is {worst(bad).name}"
    if math.isinf(worst(bad).error):
        return f"{text}, which no rank has"
    if any(diff.spread > tolerance.buffer for diff in bad):
        return f"{text}, and ranks disagree: each rank has statistics of its own samples"
    multiples = [diff for diff in bad if diff.residual <= tolerance.buffer and diff.factor > 0]
    if multiples:
        buffer = worst(multiples)
        return (
            f"{text}; {buffer.name} is {_size(buffer.factor)}: it was updated in recomputed or "
            "padded microbatches, or not in all microbatches"
        )
    return f"{text}: it was updated with other samples, or the samples had other weights"


def _common_factor(bad: Sequence[Difference], tolerance: Tolerance) -> float | None:
    """Return the factor, other than 1, that explains all errors, or None if there is none."""
    factor = worst(bad).factor
    loose = 100 * tolerance.gradient  # the factor multiplies rounding errors, too
    explained = all(
        diff.residual <= loose * max(1, abs(factor)) and abs(diff.factor - factor) <= loose
        for diff in bad
    )
    return factor if explained and abs(factor - 1) > tolerance.gradient else None


def _size(factor: float) -> str:
    if factor <= 0:
        return f"{factor:.3f} × the expected value"
    return f"{factor:.3f} × too large" if factor > 1 else f"{1 / factor:.3f} × too small"


def _cause(factor: float, setting: Setting) -> str:
    causes = list(_equal_sizes(factor, setting))
    if not causes:
        return "the factor equals neither the size of an axis nor the number of microbatches"
    sizes = " or ".join(causes)
    if factor > 1:
        return f"not divided by {sizes}, or summed over it once too often"
    return f"divided by {sizes} once too often, or a part of the sum is missing"


def _equal_sizes(factor: float, setting: Setting) -> Iterator[str]:
    """Yield the axes and counts of the setting whose size equals `factor` or its inverse."""
    layout = setting.layout
    sizes = {axis: ranks for axis, ranks in layout.axes.items() if ranks > 1}
    sizes["the microbatches"] = setting.microbatches
    if layout.dp > 1 and layout.shard > 1:
        sizes["dp × shard"] = layout.data_ranks
    if layout.size not in sizes.values():
        sizes["all ranks"] = layout.size
    if layout.data_ranks > 1:
        axes = [axis for axis in ("dp", "shard") if layout.axes[axis] > 1]
        name = " × ".join([*axes, "the microbatches"])
        sizes[name] = layout.data_ranks * setting.microbatches
    if factor <= 0 or not math.isfinite(factor):
        return
    ratio = max(factor, 1 / factor)
    for name, size in sizes.items():
        if size > 1 and math.isclose(ratio, size, rel_tol=1e-3):
            yield f"{name} = {size}"


def _shared_axes(layout: Layout) -> str:
    axes = [axis for axis in ("dp", "shard", "tp") if layout.axes[axis] > 1]
    return " or ".join(f"{axis} = {layout.axes[axis]}" for axis in axes) or "any axis"


def _worst_name(bad: Sequence[Difference], setting: Setting) -> str:
    name = worst(bad).name
    return f"{name} ({setting.roles.get(name, 'unknown')})"
