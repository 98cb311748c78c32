"""What messages cost: seconds = α × rounds + β × bytes, fitted to what was seen."""

from collections.abc import Sequence

Row = tuple[float, float, float, float]  # weight, rounds, bytes, seconds


def alpha_beta(rows: Sequence[Row]) -> tuple[float, float]:
    """α and β by weighted least squares, neither below 0.

    Where the rows do not tell them apart (bytes grow as rounds do), all of it is β; where they have
    no bytes, α.
    """
    aa = sum(w * rounds * rounds for w, rounds, _, _ in rows)
    bb = sum(w * size * size for w, _, size, _ in rows)
    ab = sum(w * rounds * size for w, rounds, size, _ in rows)
    at = sum(w * rounds * seconds for w, rounds, _, seconds in rows)
    bt = sum(w * size * seconds for w, _, size, seconds in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        both = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
        if min(both) >= 0:
            return both
    # The best that is nowhere below 0 lies on an edge: one of the two is 0.
    only_beta, only_alpha = (0.0, bt / bb if bb else 0.0), (at / aa if aa else 0.0, 0.0)
    same = 1e-9 * sum(w * seconds * seconds for w, _, _, seconds in rows)
    if error(rows, only_alpha) < error(rows, only_beta) - same:
        return only_alpha
    return only_beta


def error(rows: Sequence[Row], pair: tuple[float, float]) -> float:
    """What α and β leave unexplained: the weighted sum of squares."""
    alpha, beta = pair
    return sum(w * (alpha * rounds + beta * size - t) ** 2 for w, rounds, size, t in rows)
