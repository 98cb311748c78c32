"""From numbers to words: what the errors of a layout have in common, and what that points to.

A step's values come about one after the other: loss and gradients, the norm, the update. What is
wrong first is named; what follows from it is not. Buffers come last: training does not read them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tutti.parallel.layout import Layout
from tutti.parity.difference import Difference, StepDifference, worst, wrong
from tutti.parity.tolerance import Tolerance


@dataclass(frozen=True)
class Setting:
    """Under what the differences were seen."""

    layout: Layout
    microbatches: int
    samples: Sequence[int]
    """Of each step, over all ranks."""
    roles: Mapping[str, str]
    """What each parameter is in its model."""


def diagnose(steps: Sequence[StepDifference], setting: Setting, tolerance: Tolerance) -> str | None:
    """One line about the first thing that is wrong; None if nothing is."""
    for number, step in enumerate(steps):
        if step.within(tolerance):
            continue
        bad = wrong(step.gradients, tolerance.gradient)
        if bad:
            said = _gradients(step, bad, setting, setting.samples[number], tolerance)
        elif step.loss.error > tolerance.loss:
            said = _loss(step, setting)
        elif step.norm.error > tolerance.loss:
            said = _norm(step, setting)
        elif not wrong(step.updates, tolerance.update):
            said = _buffers(wrong(step.buffers, tolerance.buffer), step, tolerance)
        else:
            said = _update(wrong(step.updates, tolerance.update), step, setting)
        return f"{_when(number, setting)}{said}"
    return None


def _when(number: int, setting: Setting) -> str:
    """Nothing for the first step; for a later one, what is new about it."""
    if number == 0:
        return ""
    count, ranks = setting.samples[number], setting.layout.data_ranks
    new = ""
    if count % (ranks * setting.microbatches):
        new = f", whose {count} samples do not divide by {ranks} data ranks × "
        new += f"{setting.microbatches} microbatches"
    return f"only from step {number + 1} on{new}: "


def _gradients(
    step: StepDifference,
    bad: Sequence[Difference],
    setting: Setting,
    samples: int,
    tolerance: Tolerance,
) -> str:
    total = len(step.gradients)
    factor = _common_factor(bad, tolerance)
    if any(not math.isfinite(each.error) for each in bad):
        return f"gradients are not finite, or not there at all, as that of {_named(bad, setting)}"
    if len(bad) == total and factor is not None:
        return f"gradients are {_size(factor)}: {_why(factor, setting)}"
    if len(bad) < total:
        roles = {setting.roles.get(each.name, "unknown") for each in bad}
        if len(roles) == 1:
            return _one_role(bad, roles.pop(), factor, setting, tolerance)
    which = (
        f"{len(bad)} of {total} gradients differ" if total > len(bad) else "all gradients differ"
    )
    if _torn(bad, tolerance):
        return (
            f"{which}, and ranks disagree, most in {_named(bad, setting)}: not summed over "
            f"{_shared_axes(setting.layout)}"
        )
    if factor is not None:
        return f"{which}, by one factor: they are {_size(factor)}: {_why(factor, setting)}"
    missing = (1 - step.loss.factor) * samples
    if step.loss.error > tolerance.loss and 0.4 < abs(missing) < 0.1 * samples + 1:
        count = max(1, round(abs(missing)))
        some = f"{count} of the step's {samples} samples"
        said = "is missing" if count == 1 else "are missing"
        done = said if missing > 0 else said.replace("missing", "counted twice")
        return f"{which} by no one factor, and the loss is {step.loss.factor:.4f} × : {some} {done}"
    also = " and the loss does" if step.loss.error > tolerance.loss else ", while the loss agrees"
    hint = ": other samples or other weights" if len(bad) == total and also[0] == " " else ""
    return f"{which} by no one factor{also}{hint}; most in {_named(bad, setting)}"


def _one_role(
    bad: Sequence[Difference],
    role: str,
    factor: float | None,
    setting: Setting,
    tolerance: Tolerance,
) -> str:
    """Only parameters of one kind are wrong."""
    there_are = sum(1 for each in setting.roles.values() if each == role)
    size = "" if factor is None else f", {_size(factor)}"
    if role == "tied embedding":
        half = "a half of its gradient is missing" if factor is None else _size(factor)
        return (
            f"only {bad[0].name}, the tied embedding, is wrong ({half}): its gradient is the sum "
            "of what embedding and head give it"
        )
    if len(bad) == 1:
        who = f"only {bad[0].name} ({role}) is wrong{size}"
    else:
        who = f"only {role} parameters are wrong{size}, {len(bad)} of {there_are}"
        who += f", most {worst(bad).name}"
    layout = setting.layout
    torn = _torn(bad, tolerance)
    if role == "norm" and layout.tp > 1 and (torn or factor is None):
        return f"{who}: not reduced over tp (each rank saw a part of the sequence)"
    if torn:
        return f"{who}, and ranks disagree: not summed over {_shared_axes(layout)}"
    return f"{who}: {_why(factor, setting)}" if factor is not None else f"{who}, by no one factor"


def _loss(step: StepDifference, setting: Setting) -> str:
    factor = step.loss.factor
    causes = list(_equal_to(factor, setting))
    said = f"the loss is {_size(factor)}, while all gradients agree"
    if factor > 1 and causes:
        return f"{said}: as large as {' and '.join(causes)}: added once for each"
    if causes:
        return f"{said}: as small as 1 / {' and 1 / '.join(causes)}: only a part is added up"
    return f"{said}: what is reported is not what was minimised"


def _norm(step: StepDifference, setting: Setting) -> str:
    factor = step.norm.factor
    # Ranks that hold different parameters have squares to add: a norm is off by a square root.
    causes = list(_equal_to(factor * factor, setting))
    said = f"gradients agree, but the norm they were clipped by is {_size(factor)}"
    if causes:
        much = "counted once for each" if factor > 1 else "a part of them is left out"
        return f"{said}, the root of {' or '.join(causes)}: {much}"
    axes = [axis for axis in ("pp", "tp", "shard") if setting.layout.axes[axis] > 1]
    over = f": is it summed over {', '.join(axes)}?" if axes else ""
    return f"{said}{over}"


def _update(bad: Sequence[Difference], step: StepDifference, setting: Setting) -> str:
    which = f"{len(bad)} of {len(step.updates)} parameters"
    return (
        f"gradients and norm agree, but the update of {which} does not, most of "
        f"{_named(bad, setting)}: look at learning rate, weight decay and the optimizer's state"
    )


def _buffers(bad: Sequence[Difference], step: StepDifference, tolerance: Tolerance) -> str:
    most = worst(bad)
    said = (
        f"gradients and updates agree, but {len(bad)} of {len(step.buffers)} buffers do not, most "
        f"{most.name}"
    )
    if math.isinf(most.error):
        return f"{said}, which no rank has"
    if any(each.spread > tolerance.buffer for each in bad):
        return f"{said}, and ranks disagree: each has statistics of its own samples"
    multiples = [each for each in bad if each.residual <= tolerance.buffer and each.factor > 0]
    if multiples:
        most = worst(multiples)
        return (
            f"{said}; {most.name} is {_size(most.factor)}: it was updated by microbatches that ran "
            "again for backward or were filled up, or not by all there are"
        )
    return f"{said}: it saw other samples, or they were weighed otherwise"


def _common_factor(bad: Sequence[Difference], tolerance: Tolerance) -> float | None:
    """The factor that explains all of them, if one does; never 1."""
    factor = worst(bad).factor
    loose = 100 * tolerance.gradient  # a factor multiplies rounding, too
    explained = all(
        each.residual <= loose * max(1, abs(factor)) and abs(each.factor - factor) <= loose
        for each in bad
    )
    return factor if explained and abs(factor - 1) > tolerance.gradient else None


def _torn(bad: Sequence[Difference], tolerance: Tolerance) -> bool:
    """Whether ranks that should hold the same gradient hold different ones."""
    return any(each.spread > tolerance.gradient for each in bad)


def _size(factor: float) -> str:
    if factor <= 0:
        return f"{factor:.3f} × what they should be"
    return f"{factor:.3f} × too large" if factor > 1 else f"{1 / factor:.3f} × too small"


def _why(factor: float, setting: Setting) -> str:
    causes = list(_equal_to(factor, setting))
    if not causes:
        return "no axis of the layout and no number of microbatches is as large"
    said = " or ".join(causes)
    if factor > 1:
        return f"not divided by {said}, or added up once too often over it"
    return f"divided by {said} once too often, or one of them only has a part"


def _equal_to(factor: float, setting: Setting) -> Iterator[str]:
    """Which numbers of the setting a factor, or its inverse, is equal to."""
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
    """The axes over which a gradient is a sum."""
    axes = [axis for axis in ("dp", "shard", "tp") if layout.axes[axis] > 1]
    return " or ".join(f"{axis} = {layout.axes[axis]}" for axis in axes) or "any axis"


def _named(bad: Sequence[Difference], setting: Setting) -> str:
    name = worst(bad).name
    return f"{name} ({setting.roles.get(name, 'unknown')})"
