"""tutti profile --memory: the peak memory of an unchanged program by cause.

The sizes of the model are known, so the expected bytes of parameters, gradients, optimizer state
and activations are computed by hand. The counts are exact.
"""

import json
from pathlib import Path

import torch
from torch import nn

from tutti.profile.capture import Capture
from tutti.profile.profile_table import profile_lines
from worlds import run_tutti

WIDTH, BATCH, LAYERS = 64, 32, 3
FLOAT = 4


def test_a_program_without_tutti_has_the_parts_of_its_model(tmp_path: Path) -> None:
    script = Path(__file__).parent / "plain_ddp.py"
    out = tmp_path / "out"
    flags = ["--memory", "--wait", "3", "--warmup", "1", "--active", "1", "--out", str(out)]
    done = run_tutti(
        *("profile", *flags, "--json", str(tmp_path / "p.json"), "--"),
        *("torchrun", "--nproc-per-node", "2", str(script), "gloo", "8"),
        timeout=100,
        env={"BATCH": "2048"},
    )
    assert done.returncode == 0, done.stderr
    assert "memory by cause" in done.stdout and "largest activations of rank 0" in done.stdout
    ranks = json.loads((tmp_path / "p.json").read_text())["ranks"]
    assert len(ranks) == 2
    for row in ranks:
        memory = row["memory"]
        # plain_ddp.py: 4 layers of 128 × 128 with a bias, SGD without momentum, DDP with buckets
        # beside the gradients. Each layer keeps its input, and the loss keeps the output. The sum
        # is largest when backward begins, before the gradients exist.
        size = 4 * (128 * 128 + 128) * FLOAT
        assert memory["parameters"] == size and memory["optimizer"] == 0
        assert memory["activations"] == 5 * 2048 * 128 * FLOAT
        assert memory["gradients"] < size and memory["buffers"] == size
        assert memory["fragmentation"] == 0
        parts = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")
        assert sum(memory[part] for part in parts) == memory["total"]
    from tutti.report.figures.training_curves import memory_by_cause
    from tutti.report.sources import read_sources

    (figure,) = memory_by_cause(read_sources([out]).runs)
    assert "Memory by cause" in str(figure)


def test_activations_are_counted_by_module_and_the_hooks_are_removed(tmp_path: Path) -> None:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(BATCH, WIDTH)
    capture = Capture(tmp_path, wait=3, warmup=0, active=1, memory=True)
    with capture:
        for _ in range(6):
            model(inputs).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            capture.step()
    from tutti.profile.explain import explain, trace_files

    rows = explain(trace_files(tmp_path)).rows()
    memory = rows["ranks"][0]["memory"]
    weight, activation = WIDTH * WIDTH * FLOAT, BATCH * WIDTH * FLOAT
    assert memory["parameters"] == LAYERS * weight
    # Adam keeps two moments and a step count of 4 bytes for each weight. At the end of backward all
    # gradients exist and activations are freed; the sum is largest then or at its beginning.
    assert memory["optimizer"] == LAYERS * (2 * weight + 4)
    assert memory["gradients"] == LAYERS * weight
    modules = {row["module"]: row["bytes"] for row in memory["activations_by_module"]}
    assert all(size == activation for size in modules.values())
    assert any("memory by cause" in line for line in profile_lines(rows))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(inputs)
    assert saved and not torch.nn.modules.module._global_forward_pre_hooks
