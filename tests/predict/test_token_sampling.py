"""Sampling tokens: with the right probabilities, from seed, prompt and position only."""

import numpy as np
import pytest
import torch

from tutti.predict.generate_text import Sampling, uniform
from tutti.world.errors import UsageError

LOGITS = torch.tensor([[1.0, 3.0, -2.0, 2.0, 0.0]], dtype=torch.float64)
DRAWS = 20_000


def frequencies(sampling: Sampling) -> np.ndarray:
    picked = [sampling.pick(LOGITS, [0], position)[0] for position in range(DRAWS)]
    return np.bincount(picked, minlength=5) / DRAWS


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (1.0, 2), (2.0, 3)])
def test_token_frequencies_match_their_probabilities(temperature: float, top_k: int) -> None:
    scaled = LOGITS[0] / temperature
    if top_k:
        scaled[scaled < scaled.topk(top_k).values[-1]] = -torch.inf
    expected = scaled.softmax(0).numpy()
    # Five standard deviations of a mean of 20,000 draws.
    tolerance = 5 * np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(frequencies(Sampling(temperature, top_k)) - expected) <= tolerance).all()


def test_temperature_0_top_1_and_a_tiny_temperature_take_the_most_likely_token() -> None:
    for sampling in (Sampling(0.0), Sampling(1.0, top_k=1), Sampling(1e-300), Sampling(1e-3)):
        assert [sampling.pick(LOGITS, [0], n)[0] for n in range(20)] == [1] * 20
    assert Sampling(0.0).pick(torch.zeros(1, 4), [0], 0) == [0]  # the first of equal logits


def test_a_draw_depends_on_seed_prompt_and_position_only() -> None:
    sampling = Sampling(1.0, 0, seed=3)
    table = LOGITS.expand(4, 5)
    batched = sampling.pick(table, [0, 1, 2, 3], position=7)
    separate = [sampling.pick(LOGITS, [prompt], 7)[0] for prompt in range(4)]
    assert batched == separate
    numbers = {uniform(s, p, n) for s in range(10) for p in range(10) for n in range(10)}
    assert len(numbers) == 1000 and all(0 <= number < 1 for number in numbers)
    assert uniform(0, 1, 2) == pytest.approx(uniform(0, 1, 2)) != uniform(0, 2, 1)


def test_invalid_values_are_refused() -> None:
    with pytest.raises(UsageError, match="--temperature must be at least 0, got -1"):
        Sampling(-1)
    with pytest.raises(UsageError, match=r"--temperature .* got nan"):
        Sampling(float("nan"))
    with pytest.raises(UsageError, match=r"--top-k .* got -1"):
        Sampling(1, -1)
    with pytest.raises(UsageError, match="not finite"):
        Sampling().pick(torch.tensor([[1.0, torch.nan]]), [0], 0)
