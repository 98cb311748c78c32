"""Diagnosis: the probable cause of a layout's errors, in one line.

A step computes loss and gradients, then the norm, then the update. The first of these that is wrong
is reported, not the errors that follow from it. Buffers are checked last: training does not read
them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tutti.parallel.layout import Layout
from tutti.parity.compare import Difference, StepDifference, worst, wrong
from tutti.parity.tolerances import Tolerance


@dataclass(frozen=True)
class Setting:
    """The conditions of a comparison."""

    layout: Layout
    microbatches: int
    samples: Sequence[int]
    """The samples of each step, over all ranks."""
    roles: Mapping[str, str]
    """The role of each parameter in its model."""


def diagnose(steps: Sequence[StepDifference], setting: Setting, tolerance: Tolerance) -> str | None:
    """Return one line about the first error; None if there is none."""
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
                f"parameters differs, most for {_worst_name(bad, setting)}: check learning rate, "
                "weight decay and the optimizer's state"
            )
        elif bad := wrong(step.buffers, tolerance.buffer):
            text = _buffers(bad, step, tolerance)
        else:
            continue
        return f"{_when(number, setting)}{text}"
    return None


def _when(number: int, setting: Setting) -> str:
    """Return an empty string for the first step, and a text that names any later step."""
    if number == 0:
        return ""
    count, ranks = setting.samples[number], setting.layout.data_ranks
    uneven = ""
    if count % (ranks * setting.microbatches):
        uneven = f", whose {count} samples are not divisible by {ranks} data ranks × "
        uneven += f"{setting.microbatches} microbatches"
    return f"only from step {number + 1} on{uneven}: "


def _gradients(
    step: StepDifference,
    bad: Sequence[Difference],
    setting: Setting,
    samples: int,
    tolerance: Tolerance,
) -> str:
    total, most = len(step.gradients), _worst_name(bad, setting)
    factor = _common_factor(bad, tolerance)
    # Whether ranks hold different values of the same gradient.
    disagree = any(each.spread > tolerance.gradient for each in bad)
    if any(not math.isfinite(each.error) for each in bad):
        return f"gradients are not finite or missing, for example that of {most}"
    if len(bad) == total and factor is not None:
        return f"gradients are {_size(factor)}: {_cause(factor, setting)}"
    roles = {setting.roles.get(each.name, "unknown") for each in bad}
    if len(bad) < total and len(roles) == 1:
        return _one_role(bad, roles.pop(), factor, disagree, setting)
    which = (
        f"{len(bad)} of {total} gradients differ" if len(bad) < total else "all gradients differ"
    )
    if disagree:
        axes = _shared_axes(setting.layout)
        return f"{which}, and ranks disagree, most for {most}: not summed over {axes}"
    if factor is not None:
        return f"{which}, by a common factor: they are {_size(factor)}: {_cause(factor, setting)}"
    missing = (1 - step.loss.factor) * samples
    loss_differs = step.loss.error > tolerance.loss
    if loss_differs and 0.4 < abs(missing) < 0.1 * samples + 1:
        count = max(1, round(abs(missing)))
        problem = f"{'is' if count == 1 else 'are'} {'missing' if missing > 0 else 'counted twice'}"
        return (
            f"{which} by no common factor, and the loss is {step.loss.factor:.4f} × the expected "
            f"one: {count} of the step's {samples} samples {problem}"
        )
    loss = ", and the loss differs" if loss_differs else ", while the loss agrees"
    hint = ": different samples or weights" if len(bad) == total and loss_differs else ""
    return f"{which} by no common factor{loss}{hint}; most for {most}"


def _one_role(
    bad: Sequence[Difference], role: str, factor: float | None, disagree: bool, setting: Setting
) -> str:
    total = [*setting.roles.values()].count(role)
    size = "" if factor is None else f", {_size(factor)}"
    if role == "tied embedding":
        problem = "half of its gradient is missing" if factor is None else _size(factor)
        return (
            f"only {bad[0].name}, the tied embedding, is wrong ({problem}): its gradient is the "
            "sum of the embedding's and the head's"
        )
    if len(bad) == 1:
        who = f"only {bad[0].name} ({role}) is wrong{size}"
    else:
        who = f"only {role} parameters are wrong{size}, {len(bad)} of {total}"
        who += f", most {worst(bad).name}"
    if role == "norm" and setting.layout.tp > 1 and (disagree or factor is None):
        return f"{who}: not reduced over tp (each rank has a part of the sequence)"
    if disagree:
        return f"{who}, and ranks disagree: not summed over {_shared_axes(setting.layout)}"
    if factor is None:
        return f"{who}, by no common factor"
    return f"{who}: {_cause(factor, setting)}"


def _loss(factor: float, setting: Setting) -> str:
    causes = list(_equal_sizes(factor, setting))
    text = f"the loss is {_size(factor)}, while all gradients agree"
    if factor > 1 and causes:
        return f"{text}: the factor is {' and '.join(causes)}: summed once per rank"
    if causes:
        return f"{text}: the factor is 1 / {' and 1 / '.join(causes)}: only a part is summed"
    return f"{text}: the reported loss is not the minimised one"


def _norm(factor: float, setting: Setting) -> str:
    # The norm is the root of a sum of squares over ranks: a sum that is wrong by a factor makes the
    # norm wrong by the root of this factor.
    causes = list(_equal_sizes(factor * factor, setting))
    text = f"gradients agree, but the norm they were clipped by is {_size(factor)}"
    if causes:
        problem = "counted once per rank" if factor > 1 else "a part of the squares is missing"
        return f"{text}, the root of {' or '.join(causes)}: {problem}"
    axes = [axis for axis in ("pp", "tp", "shard") if setting.layout.axes[axis] > 1]
    over = f": is it summed over {', '.join(axes)}?" if axes else ""
    return f"{text}{over}"


def _buffers(bad: Sequence[Difference], step: StepDifference, tolerance: Tolerance) -> str:
    most = worst(bad)
    text = (
        f"gradients and updates agree, but {len(bad)} of {len(step.buffers)} buffers differ, most "
        f"{most.name}"
    )
    if math.isinf(most.error):
        return f"{text}, which no rank has"
    if any(each.spread > tolerance.buffer for each in bad):
        return f"{text}, and ranks disagree: each has statistics of its own samples"
    multiples = [each for each in bad if each.residual <= tolerance.buffer and each.factor > 0]
    if multiples:
        most = worst(multiples)
        return (
            f"{text}; {most.name} is {_size(most.factor)}: it was updated in recomputed or padded "
            "microbatches, or not in all microbatches"
        )
    return f"{text}: it depends on different samples, or on other weights of the samples"


def _common_factor(bad: Sequence[Difference], tolerance: Tolerance) -> float | None:
    """Return the factor, other than 1, that explains all errors; None if there is none."""
    factor = worst(bad).factor
    loose = 100 * tolerance.gradient  # the factor multiplies rounding errors, too
    explained = all(
        each.residual <= loose * max(1, abs(factor)) and abs(each.factor - factor) <= loose
        for each in bad
    )
    return factor if explained and abs(factor - 1) > tolerance.gradient else None


def _size(factor: float) -> str:
    if factor <= 0:
        return f"{factor:.3f} × the expected value"
    return f"{factor:.3f} × too large" if factor > 1 else f"{1 / factor:.3f} × too small"


def _cause(factor: float, setting: Setting) -> str:
    causes = list(_equal_sizes(factor, setting))
    if not causes:
        return "no axis of the layout and no number of microbatches equals that factor"
    sizes = " or ".join(causes)
    if factor > 1:
        return f"not divided by {sizes}, or summed over it once too often"
    return f"divided by {sizes} once too often, or a part of the sum is missing"


def _equal_sizes(factor: float, setting: Setting) -> Iterator[str]:
    """Yield the axes and counts of the setting whose size equals a factor or its inverse."""
    layout = setting.layout
    sizes = {axis: ranks for axis, ranks in layout.axes.items() if ranks > 1}
    sizes["the microbatches"] = setting.microbatches
    if layout.dp > 1 and layout.shard > 1:
        sizes["dp × shard"] = layout.data_ranks
    if layout.size not in sizes.values():
        sizes["all ranks"] = layout.size
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
