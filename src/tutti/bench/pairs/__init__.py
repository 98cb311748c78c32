"""Pairs: a baseline and its optimized form, run in turns in one process group, results compared.

A pair of one's own is a function in a file, for `tutti bench pairs --file FILE`:

    import torch
    from tutti.bench.pairs import Pair, Setting

    def one_call_for_all_rows(setting: Setting) -> Pair:
        \"\"\"a sum for each row → one sum over the matrix\"\"\"
        matrix = torch.ones(1000, 1000, device=setting.device)
        return Pair(
            baseline=lambda: torch.stack([row.sum() for row in matrix]),
            optimized=lambda: matrix.sum(1),
            tolerance=1e-6,
        )

    PAIRS = [one_call_for_all_rows]

Its name is the function's, with dashes; the first line of its docstring says what the two sides do.
"""

from tutti.bench.pairs.pair import Pair, Setting
from tutti.bench.unsupported import Unsupported

__all__ = ["Pair", "Setting", "Unsupported"]
