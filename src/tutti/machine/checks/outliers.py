"""The odd one out: by median and median absolute deviation, which the odd one cannot shift."""

import math
from collections.abc import Mapping
from statistics import median

# Iglewicz and Hoaglin's modified z-score: 0.6745 makes the MAD that of a normal distribution.
_Z = 3.5
_NORMAL = 0.6745
# What differs by less is not worth a word, however regular the others are.
FLOOR = 0.10
# Of three or four, one that is disturbed widens the deviation until nobody is odd; what does less
# than a quarter of the usual is odd whatever the others do.
_FAR = 0.25
# Two have no majority: only when one does less than half of the other is it named.
_OF_TWO = 0.5


def slow_ones(values: Mapping[str, float], floor: float = FLOOR) -> list[str]:
    """The names whose value is too low beside the others', the lowest first.

    Deviations are those of logarithms, since speeds differ by factors: a link at a hundredth
    stands out even where the good ones differ by half.
    """
    if len(values) < 2:
        return []
    if len(values) == 2:
        best = max(values.values())
        return [name for name, value in values.items() if value < _OF_TWO * best]
    logs = {name: math.log(max(value, 1e-9)) for name, value in values.items()}
    middle = median(logs.values())
    deviation = median(abs(each - middle) for each in logs.values())
    enough = -math.log(1 - floor)
    too_far = min(_Z * deviation / _NORMAL, -math.log(_FAR))
    slow = [name for name, each in logs.items() if middle - each > max(enough, too_far)]
    return sorted(slow, key=lambda name: values[name])
