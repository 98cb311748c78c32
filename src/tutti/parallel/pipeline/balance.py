"""Where to cut: contiguous stages whose most expensive one is as cheap as possible.

A pipeline is as fast as its slowest stage; the others wait for it at every microbatch. So the
largest cost of a stage is made as small as it can be, exactly, and among the cuts that reach it
the most even one is taken (the least sum of squares).
"""

from collections.abc import Callable, Sequence

from tutti.world.errors import UsageError


def cut(costs: Sequence[float], stages: int) -> list[range]:
    """Cut a list into contiguous, non-empty parts with the smallest largest sum."""
    check_stages(len(costs), stages, 1)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(start: int, end: int) -> float:
        return sums[end] - sums[start]

    largest = _best(len(costs), stages, max, cost_of)[0]

    def squares(best: float, part: float) -> float:
        return best + part * part if part <= largest else float("inf")

    ends = _best(len(costs), stages, squares, cost_of)[1]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def cut_evenly(count: int, stages: int) -> list[range]:
    """Cut so that the numbers of layers differ by one at most; the later stages have fewer."""
    check_stages(count, stages, 1)
    ends = [-(-count * (stage + 1) // stages) for stage in range(stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def check_stages(layers: int, ranks: int, stages_per_rank: int) -> None:
    """Raise UsageError, with the equation and the cure, if there are more stages than layers."""
    stages = ranks * stages_per_rank
    if stages <= layers:
        return
    if stages_per_rank == 1:
        needs = f"pp{ranks} needs {stages} layers"
    else:
        needs = f"pp{ranks} with {stages_per_rank} stages per rank needs "
        needs += f"{ranks} × {stages_per_rank} = {stages} layers"
    fitting = layers // stages_per_rank
    cures = [f"pp{fitting}"] if fitting > 1 else []
    if stages_per_rank > 1 and layers >= 2:
        cures.append(f"pp{min(ranks, layers)} with --pipeline-schedule 1f1b")
    cures.append("a model with more layers")
    raise UsageError(f"layout {needs}, the model has {layers}: use {' or '.join(cures)}")


def _best(
    count: int,
    stages: int,
    join: Callable[[float, float], float],
    cost_of: Callable[[int, int], float],
) -> tuple[float, list[int]]:
    """Dynamic programming over (layers so far, stages so far): the best value, and the ends."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(1, stages + 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        for end in range(stage, count - (stages - stage) + 1):
            options = [
                (join(value, cost_of(start, end)), [*ends, end])
                for start, (value, ends) in best.items()
                if start < end
            ]
            longer[end] = min(options, key=lambda option: option[0])
        best = longer
    return best[count]
