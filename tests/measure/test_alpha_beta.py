"""α and β of messages are recovered, and never negative."""

import pytest

from tutti.measure.collective_bandwidth import fit_alpha_beta


def test_planted_alpha_and_beta_are_recovered_with_any_weights() -> None:
    rows = [
        (weight, rounds, size, 2e-4 * rounds + 3e-9 * size)
        for weight, rounds, size in ((1.0, 1.0, 64.0), (5.0, 2.0, 4096.0), (0.1, 1.0, 1e6))
    ]

    assert fit_alpha_beta(rows) == (pytest.approx(2e-4), pytest.approx(3e-9))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((0.03, 0.01), (0.02, 0.0)),  # a larger message is faster: β would be negative
        ((0.001, 0.9), (0.0, 0.9 / 100)),  # α would be negative
    ],
)
def test_a_negative_value_is_replaced_by_0_and_the_other_is_refitted(
    seconds: tuple[float, float], expected: tuple[float, float]
) -> None:
    rows = [(1.0, 1.0, size, t) for size, t in zip((1.0, 100.0), seconds, strict=True)]

    alpha, beta = fit_alpha_beta(rows)

    assert (alpha, beta) == (pytest.approx(expected[0]), pytest.approx(expected[1], rel=1e-3))


def test_one_message_size_is_all_bandwidth_and_no_bytes_all_latency() -> None:
    assert fit_alpha_beta([(1.0, 1.0, 1000.0, 0.02)] * 3) == (0.0, pytest.approx(2e-5))
    assert fit_alpha_beta([(1.0, 2.0, 0.0, 0.02)]) == (pytest.approx(0.01), 0.0)
