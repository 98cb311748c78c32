"""α and β of messages: found again, and never below nothing."""

import pytest

from tutti.measure.alpha_beta import fit_alpha_beta as alpha_beta


def test_planted_alpha_and_beta_are_found_whatever_the_weights() -> None:
    rows = [
        (weight, rounds, size, 2e-4 * rounds + 3e-9 * size)
        for weight, rounds, size in ((1.0, 1.0, 64.0), (5.0, 2.0, 4096.0), (0.1, 1.0, 1e6))
    ]

    assert alpha_beta(rows) == (pytest.approx(2e-4), pytest.approx(3e-9))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((0.03, 0.01), (0.02, 0.0)),  # a larger message is faster: a line would fall
        ((0.001, 0.9), (0.0, 0.9 / 100)),  # a line would begin below 0
    ],
)
def test_what_would_be_below_zero_is_zero_and_the_other_is_the_best_without_it(
    seconds: tuple[float, float], expected: tuple[float, float]
) -> None:
    rows = [(1.0, 1.0, size, t) for size, t in zip((1.0, 100.0), seconds, strict=True)]

    alpha, beta = alpha_beta(rows)

    assert (alpha, beta) == (pytest.approx(expected[0]), pytest.approx(expected[1], rel=1e-3))


def test_one_kind_of_message_is_all_bandwidth_and_one_without_bytes_all_latency() -> None:
    assert alpha_beta([(1.0, 1.0, 1000.0, 0.02)] * 3) == (0.0, pytest.approx(2e-5))
    assert alpha_beta([(1.0, 2.0, 0.0, 0.02)]) == (pytest.approx(0.01), 0.0)
