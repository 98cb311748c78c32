"""Dealing out samples: every one once, in order, in the same batches for any number of ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.data import TensorSamples
from tutti.predict.deal import LONGEST_RUN, Deal, DealtSamples

SIZES = {"samples": st.integers(1, 300), "batch": st.integers(1, 9), "ranks": st.integers(1, 7)}


@given(**SIZES)
def test_turns_of_all_ranks_one_after_the_other_are_the_data_set(
    samples: int, batch: int, ranks: int
) -> None:
    deal = Deal(samples, batch, ranks)
    seen: list[int] = []
    for turn in range(deal.turns):
        for rank in range(ranks):
            first = deal.first(turn, rank)
            seen += range(first, first + deal.count(turn, rank))
    assert seen == list(range(samples))


@given(**SIZES)
def test_a_rank_fetches_the_samples_of_its_turns_in_batches_that_do_not_depend_on_ranks(
    samples: int, batch: int, ranks: int
) -> None:
    deal = Deal(samples, batch, ranks)
    numbers = torch.arange(samples)
    batches = []
    for rank in range(ranks):
        dealt = DealtSamples(TensorSamples(numbers, numbers), deal, rank)
        expected = [
            deal.first(turn, rank) + each
            for turn in range(deal.turns)
            for each in range(deal.count(turn, rank))
        ]
        mine = dealt.batch(range(len(dealt)))[0]
        assert mine.tolist() == expected
        batches += [part.tolist() for part in torch.split(mine, batch)] if len(mine) else []
    assert sorted(batches) == [part.tolist() for part in torch.split(numbers, batch)]


@given(**SIZES)
def test_no_rank_has_more_than_a_turn_of_batches_more_than_another(
    samples: int, batch: int, ranks: int
) -> None:
    deal = Deal(samples, batch, ranks)
    totals = [deal.total(rank) for rank in range(ranks)]
    assert max(totals) - min(totals) <= deal.run * batch <= LONGEST_RUN * batch
    if samples <= batch * ranks:  # a batch for each: all of them at once
        assert deal.turns == 1 and deal.run == 1
