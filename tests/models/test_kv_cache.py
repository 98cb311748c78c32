"""The key-value cache: decoding with it gives the logits of the whole sequence."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gpt import SMALL, double, tokens
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tutti.models import GPT, KVCache

LENGTH = 32  # equal to max_seq_len, so that the angles of all positions are used


def in_pieces(model: GPT, x: Tensor, pieces: list[int]) -> Tensor:
    cache = KVCache(capacity=x.size(1))
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in torch.split(x, pieces, dim=1)]
    assert cache.length == x.size(1)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_decoding_token_by_token_gives_the_logits_of_one_forward(
    kv_heads: int | None,
) -> None:
    config = dataclasses.replace(SMALL, kv_heads=kv_heads)
    model, x = double(config), tokens(config, batch=3, length=LENGTH)
    torch.testing.assert_close(in_pieces(model, x, [1] * LENGTH), model(x), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(cuts=st.sets(st.integers(1, LENGTH - 1)))
def test_decoding_in_parts_of_any_size_gives_the_logits_of_one_forward(cuts: set[int]) -> None:
    model, x = double(SMALL), tokens(SMALL, length=LENGTH)
    edges = [0, *sorted(cuts), LENGTH]
    pieces = [b - a for a, b in pairwise(edges)]
    torch.testing.assert_close(in_pieces(model, x, pieces), model(x), rtol=1e-12, atol=1e-12)


def test_the_cache_has_the_shape_of_the_heads_of_a_rank() -> None:
    """Like a tensor-parallel rank, whose matrices have only the rows of its heads."""
    config = dataclasses.replace(SMALL, kv_heads=2)
    model, x = double(config), tokens(config, length=8)
    for block in model.blocks.values():
        attention = block.attention
        for name in ("wq", "wk", "wv"):
            matrix = getattr(attention, name)
            half = matrix.weight.size(0) // 2
            matrix.weight = torch.nn.Parameter(matrix.weight[:half].clone())
        attention.wo.weight = torch.nn.Parameter(attention.wo.weight[:, :16].clone())
    torch.testing.assert_close(in_pieces(model, x, [5, 1, 1, 1]), model(x), rtol=1e-12, atol=1e-12)
    cache = KVCache(capacity=8)
    with torch.no_grad():
        model(x, cache=cache)
        keys, _ = cache.layer("0").extend(*[torch.empty(2, 1, 0, 8, dtype=torch.float64)] * 2)
    assert keys.shape == (2, 1, 8, 8)


def test_two_stages_with_their_own_caches_give_the_logits_of_the_whole_model() -> None:
    whole, first, second = double(SMALL), double(SMALL), double(SMALL)
    first.norm = first.head = None
    del first.blocks["1"]
    second.embed = None
    del second.blocks["0"]
    x = tokens(SMALL, length=10)
    caches = KVCache(10), KVCache(10)
    logits = []
    with torch.no_grad():
        for part in torch.split(x, [6, 1, 1, 1, 1], dim=1):
            hidden = first(part, cache=caches[0])
            logits.append(second(hidden, cache=caches[1]))
    torch.testing.assert_close(torch.cat(logits, 1), whole(x), rtol=1e-12, atol=1e-12)


def test_with_a_cache_only_the_new_token_is_computed() -> None:
    model, x = GPT(SMALL), tokens(SMALL, length=17)

    def flops(part: Tensor, cache: KVCache | None) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(part, cache=cache) if cache is not None else model(part)
        return counter.get_total_flops()

    cache = KVCache(17)
    assert flops(x[:, :16], cache) == flops(x[:, :16], None)
    # Matrix products of one token instead of 17; attention shrinks even more.
    assert flops(x[:, 16:], cache) <= flops(x, None) / 17 + 1


def test_the_error_of_a_full_cache_names_the_capacity() -> None:
    model, x = GPT(SMALL), tokens(SMALL, length=9)
    cache = KVCache(8)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="9 tokens exceed the key-value cache of 8"),
    ):
        model(x, cache=cache)
    long = KVCache(64)
    with torch.no_grad(), pytest.raises(ValueError, match="33 tokens is longer than max_seq_len"):
        model(tokens(SMALL, length=32), cache=long)
        model(x[:, :1], cache=long)
    with pytest.raises(ValueError, match=r"capacity.*at least 1, got 0"):
        KVCache(0)


def test_without_a_cache_a_block_compiles_to_one_graph() -> None:
    model = double(SMALL)
    block, hidden = model.blocks["0"], torch.randn(2, 8, 32, dtype=torch.float64)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, model.rotary), block(hidden, model.rotary))
