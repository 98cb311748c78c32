"""The cost model of messages, seconds = α × rounds + β × bytes, fitted to measured messages."""

from collections.abc import Sequence

Row = tuple[float, float, float, float]  # weight, rounds, bytes, seconds


def fit_alpha_beta(rows: Sequence[Row]) -> tuple[float, float]:
    """Fit α and β by weighted least squares, with α ≥ 0 and β ≥ 0.

    If bytes are proportional to rounds, the rows cannot separate the two terms, and α is 0. If no
    row has bytes, β is 0.
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
    # The unconstrained optimum is negative or not unique. The constrained optimum lies on an edge
    # of the allowed region, where α or β is 0.
    only_beta, only_alpha = (0.0, bt / bb if bb else 0.0), (at / aa if aa else 0.0, 0.0)
    tolerance = 1e-9 * sum(w * seconds * seconds for w, _, _, seconds in rows)
    if squared_error(rows, only_alpha) < squared_error(rows, only_beta) - tolerance:
        return only_alpha
    return only_beta


def squared_error(rows: Sequence[Row], alpha_beta: tuple[float, float]) -> float:
    """Return the weighted sum of squared residuals."""
    alpha, beta = alpha_beta
    return sum(w * (alpha * rounds + beta * size - t) ** 2 for w, rounds, size, t in rows)
