"""Predictions and texts are the same for every number of ranks and every layout.

In float64 rounding (1e-15 relative) changes neither a printed digit nor a sampled token.
"""

import json
import tempfile
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from saved_runs import CONFIG, gpt_run

import tutti
from tutti.predict.generate_text import Sampling, place_gpt
from tutti.predict.predict_dataset import Predictor, TrainedRun
from worlds import in_world

pytestmark = pytest.mark.timeout(180)

# Prompts of several lengths, one longer than the context of 12; all texts exceed the context.
PROMPTS = ["a", "def f(x):", "0123456789abc", "é\x00", "zz"]
TOKENS = 12
WINDOWS = 28  # windows of 9 bytes in the text: 7 batches of 4, not divisible by 2 or 4 ranks


def _predict_all(world: tutti.World, cases: list[list[str]]) -> list[Any]:
    return [_predict(world, Path(run), tutti.Layout.parse(layout)) for run, layout in cases]


def _predict(world: tutti.World, run: Path, layout: tutti.Layout) -> list[Any]:
    """Return the lines of the file, the score, and the texts."""
    saved = TrainedRun.open(run, "last", None, None)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        selected = {"split": "train", "limit": WINDOWS - 1, "batch": 4}
        score = Predictor(world, saved, layout, **selected).run(out)
        assert [each.name for each in Path(folder).iterdir()] == ["rows.jsonl"] * world.is_first
        lines = out.read_text() if world.is_first else ""
    generator, _ = place_gpt(world, saved, layout, saved.gpt_config())
    texts = []
    for sampling, batch in ((Sampling(1.0, 40, seed=1), 1), (Sampling(0), 3)):
        done = generator.run(PROMPTS, TOKENS, batch, sampling)
        texts.append([list(astuple(each)) for completions in done for each in completions])
    return [lines, [score.loss, score.metric, score.count], texts]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return runs of a GPT, and of a GPT whose tied embedding is shared by two pipeline stages."""
    tied = replace(CONFIG, tied=True)
    return {
        "plain": str(gpt_run(tmp_path_factory.mktemp("plain"))),
        "tied": str(gpt_run(tmp_path_factory.mktemp("tied"), tied)),
    }


@pytest.fixture(scope="module")
def one_rank(runs: dict[str, str]) -> dict[str, list[Any]]:
    """Return the results of one rank."""
    (results,) = in_world(_predict_all, 1, [[run, "dp1"] for run in runs.values()])
    return dict(zip(runs, results, strict=True))


def test_one_rank_predicts_every_sample_once_and_completes_every_prompt(
    one_rank: dict[str, list[Any]],
) -> None:
    for lines, (loss, accuracy, count), texts in one_rank.values():
        rows = [json.loads(line) for line in lines.splitlines()]
        assert [row["index"] for row in rows] == list(range(WINDOWS - 1))
        assert count == 9 * len(rows) and accuracy == sum(row["right"] for row in rows) / count
        assert loss == pytest.approx(sum(row["loss"] for row in rows) / len(rows), abs=1e-5)
        for completions in texts:
            assert [each[:2] for each in completions] == [
                [i, prompt] for i, prompt in enumerate(PROMPTS)
            ]
        assert len({text for completions in texts for _, _, text, *_ in completions}) == len(
            texts
        ) * len(PROMPTS)


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, ["dp2", "shard2", "tp2", "pp2"]),
        (4, ["dp2.tp2", "tp2.pp2", "shard2.tp2", "shard2.pp2"]),
    ],
)
def test_every_layout_gives_the_results_of_one_rank(
    runs: dict[str, str], one_rank: dict[str, list[Any]], ranks: int, layouts: list[str]
) -> None:
    _compare(runs, one_rank, ranks, layouts)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_layouts_on_a_gpu_give_the_results_of_one_rank_on_the_cpu(
    runs: dict[str, str], one_rank: dict[str, list[Any]]
) -> None:
    _compare(runs, one_rank, 2, ["dp2", "shard2", "tp2", "pp2"], gpu=True)


def _compare(
    runs: dict[str, str],
    one_rank: dict[str, list[Any]],
    ranks: int,
    layouts: list[str],
    gpu: bool = False,
) -> None:
    cases = [("plain", layout) for layout in layouts]
    cases += [("tied", layout) for layout in layouts if layout in ("pp2", "tp2.pp2")]
    requests = [[runs[run], layout] for run, layout in cases]
    first, *others = in_world(_predict_all, ranks, requests, timeout=150, gpu=gpu)
    for number, (run, layout) in enumerate(cases):
        lines, score, texts = one_rank[run]
        assert first[number][0] == lines, (run, layout)
        assert first[number][1] == pytest.approx(score, rel=1e-12), (run, layout)
        assert first[number][2] == texts, (run, layout)
        for other in others:  # all ranks have the score, rank 0 has the texts
            assert other[number][1:] == [first[number][1], [[], []]]
