"""Real run directories, made once: two ranks with traces, and one rank without."""

from pathlib import Path

import pytest

from report.cases import train


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 steps with two ranks, five of them profiled."""
    out = tmp_path_factory.mktemp("runs") / "two-ranks"
    return train(out, "--ranks", "2", "--steps", "14", "--profile")


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another learning rate, no profile."""
    return train(tmp_path_factory.mktemp("runs") / "one-rank", "--steps", "6", "--lr", "0.1")
