"""Checkpoints of one process: save, load, resume bit for bit, keep N, refuse other models."""

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tutti.train.checkpoint import Checkpoints, save
from tutti.train.checkpoint.format import DTYPES, saved_steps
from tutti.world.errors import UsageError


class AllDtypes(nn.Module):
    """Buffers of random bits in every dtype: a matrix, a scalar and an empty tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for kind, dtype in DTYPES.items():
            for form, shape in {"matrix": (3, 5), "scalar": (), "empty": (0, 4)}.items():
                count = torch.Size(shape).numel() * dtype.itemsize
                high = 2 if dtype == torch.bool else 256
                raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
                self.register_buffer(f"{kind}_{form}", raw.view(dtype).view(shape))
        self.register_buffer("not_saved", torch.ones(2), persistent=False)


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def bits(model: nn.Module) -> dict[str, list[int]]:
    state = model.state_dict()
    return {n: t.contiguous().view(-1).view(torch.uint8).tolist() for n, t in state.items()}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """A training step that draws from the generators of torch, Python and numpy."""
    optimizer.zero_grad()
    scale = random.gauss(1, 0.1) + float(np.random.normal())
    loss = (model(torch.randn(16, 4) * scale) - 1).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def save_one(directory: Path, step: int, *training: Any, **options: Any) -> None:
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(step, *training, **options)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov, fused": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, fused=True
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw, lr is a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def test_all_dtypes_are_restored_bit_for_bit(tmp_path: Path) -> None:
    saved, loaded = AllDtypes(1), AllDtypes(2)
    assert bits(saved) != bits(loaded)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        checkpoints.wait()
        result = checkpoints.load(loaded)
    assert bits(saved) == bits(loaded)
    assert result.step == 1 and result.notes == () and not checkpoints.failed


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stop", [0, 3])
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, kind: str, stop: int) -> None:
    torch.manual_seed(1)
    model = small_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(stop):
        train_step(model, optimizer)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(stop, model, optimizer, {"position": [stop, 7]})
        losses = [train_step(model, optimizer) for _ in range(3)]
    resumed = small_model()
    again = OPTIMIZERS[kind](resumed.parameters())
    for group in again.param_groups:
        group["lr"] = group["lr"] * 3  # the saved learning rate must replace this one
    train_step(resumed, again)
    loaded = Checkpoints(tmp_path).load(resumed, again)
    assert loaded.state == {"position": [stop, 7]} and loaded.step == stop
    assert [train_step(resumed, again) for _ in range(3)] == losses
    assert bits(resumed) == bits(model)


def test_optimizer_state_that_is_not_a_tensor_is_restored(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    slots = self.state[parameter]
                    slots["count"] = slots.get("count", 0) + 1
            return super().step(closure)

    model = small_model()
    optimizer = Counting(model.parameters(), lr=0.1)
    train_step(model, optimizer)
    save_one(tmp_path, 1, model, optimizer)
    resumed = small_model()
    again = Counting(resumed.parameters(), lr=0.1)
    Checkpoints(tmp_path).load(resumed, again)
    assert [again.state[p]["count"] for p in resumed.parameters()] == [1] * 6


def test_a_save_does_not_include_later_updates(tmp_path: Path, monkeypatch: Any) -> None:
    proceed = threading.Event()
    real = save.save_file

    def delayed(*arguments: Any) -> Any:
        assert proceed.wait(30)
        return real(*arguments)

    monkeypatch.setattr(save, "save_file", delayed)
    model, state = small_model(), {"list": [1]}
    before = bits(model)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, state=state)
        for parameter in model.parameters():
            parameter.data.zero_()
        state["list"].append(2)
        assert saved_steps(tmp_path) == []  # the file is not written before `proceed` is set
        proceed.set()
    loaded = Checkpoints(tmp_path).load(model)
    assert bits(model) == before and loaded.state == {"list": [1]}


def test_the_memory_of_snapshots_is_reused(tmp_path: Path) -> None:
    model = small_model()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model)
        checkpoints.wait()
        first = checkpoints._snapshot["model.0.weight"].data_ptr()
        checkpoints.save(2, model)
        assert checkpoints._snapshot["model.0.weight"].data_ptr() == first


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_newest_checkpoints_are_kept(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    with Checkpoints(tmp_path, keep=keep) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, small_model())
    assert saved_steps(tmp_path) == left == checkpoints.steps()
    assert not list(tmp_path.glob("*.tmp"))


def test_keep_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small_model(), state={"try": 1})
        checkpoints.save(1, small_model(), state={"try": 2})
        checkpoints.wait()
        assert checkpoints.load(small_model()).state == {"try": 2}
    assert {path.name for path in tmp_path.iterdir()} == {".writer", "step-00000001"}


def test_after_resuming_from_an_earlier_step_the_later_ones_are_superseded(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, small_model())
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.load(small_model(), step=10).step == 10
        checkpoints.save(15, small_model())
    assert saved_steps(tmp_path) == [10, 15]
    assert (tmp_path / "step-00000030.superseded").is_dir()


def test_an_earlier_run_that_is_still_alive_cannot_write(tmp_path: Path, capsys: Any) -> None:
    old, new = Checkpoints(tmp_path), Checkpoints(tmp_path)
    for number, checkpoints in enumerate([old, new, old]):
        checkpoints.save(number, small_model())
        checkpoints.wait()
    assert saved_steps(tmp_path) == [0, 1]
    assert "another run has begun to write" in old.failed[2] and not new.failed
    assert "step-00000002 was not written: rank 0: another run" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    save_one(tmp_path, 1, small_model())
    others = {
        r"the checkpoint has no 4\.weight, 4\.bias": nn.Sequential(*small_model(), nn.Linear(2, 2)),
        r"the checkpoint has 3\.weight, 3\.bias, but the model does not": small_model()[:3],
        r"0\.weight is .* \(8, 4\) in the checkpoint, .* \(8, 5\) in the model": nn.Sequential(
            nn.Linear(5, 8), *list(small_model())[1:]
        ),
        r"1\.num_batches_tracked is torch\.int64 .*, but torch\.float32": small_model(),
    }
    [*others.values()][3][1].num_batches_tracked = torch.tensor(0.0)
    for complaint, other in others.items():
        before = bits(other)
        with pytest.raises(UsageError, match=complaint) as caught:
            Checkpoints(tmp_path).load(other)
        assert bits(other) == before
        assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_optimizer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model = small_model()
    save_one(tmp_path, 1, model, torch.optim.SGD(model.parameters(), lr=1))
    other = small_model()
    before = bits(other)
    head, tail = other[0].parameters(), other[1:].parameters()
    for complaint, optimizer in {
        "has SGD with 1 .*, but the run has AdamW": torch.optim.AdamW(other.parameters()),
        "has SGD with 1 .*, but the run has SGD with 2": torch.optim.SGD(
            [{"params": head}, {"params": tail}], lr=1
        ),
    }.items():
        with pytest.raises(UsageError, match=complaint):
            Checkpoints(tmp_path).load(other, optimizer)
        assert bits(other) == before and not optimizer.state


def test_a_checkpoint_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    save_one(tmp_path, 1, small_model())
    model = small_model()
    with pytest.raises(UsageError, match="the checkpoint has no optimizer"):
        Checkpoints(tmp_path).load(model, torch.optim.SGD(model.parameters(), lr=1))


def test_a_missing_checkpoint_is_an_error_that_lists_the_existing_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint in"):
        Checkpoints(tmp_path / "absent").load(small_model())
    save_one(tmp_path, 5, small_model())
    with pytest.raises(UsageError, match=r"no step-00000004 .*step-00000005"):
        Checkpoints(tmp_path).load(small_model(), step=4)


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = small_model()
    wrapped = small_model()
    wrapped[3] = checkpoint_wrapper(wrapped[3])
    wrapped[0] = torch.compile(wrapped[0])
    everything = nn.DataParallel(wrapped)
    optimizer = torch.optim.AdamW(everything.parameters())
    for parameter in everything.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    save_one(tmp_path, 1, everything, optimizer)
    again = torch.optim.AdamW(plain.parameters())
    Checkpoints(tmp_path).load(plain, again)
    for a, b in zip(plain.parameters(), everything.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(again.state[a]["exp_avg"], optimizer.state[b]["exp_avg"])


def test_a_shared_parameter_is_saved_once_and_stays_shared(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    save_one(tmp_path, 1, model, torch.optim.AdamW(model.parameters()))
    Checkpoints(tmp_path).load(other, torch.optim.AdamW(other.parameters()))
    index = json.loads((tmp_path / "step-00000001" / "index.json").read_text())
    assert [name for name in index["tensors"] if name.startswith("model.")] == ["model.0.weight"]
    assert other[1].weight is other[0].weight and torch.equal(other[0].weight, model[0].weight)


def test_another_precision_is_converted_and_noted(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    save_one(tmp_path, 1, model)
    half = nn.Linear(3, 3, dtype=torch.bfloat16)
    notes = Checkpoints(tmp_path).load(half).notes
    assert notes == ("converted weight, bias from torch.float32 to torch.bfloat16",)
    assert torch.equal(half.weight, model.weight.bfloat16())


def test_tensors_with_any_memory_format_are_restored(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model.bias = nn.Parameter(torch.arange(8.0)[::2])
    save_one(tmp_path, 1, model)
    other = nn.Conv2d(3, 4, 3)
    Checkpoints(tmp_path).load(other)
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)


def test_state_that_is_not_json_is_refused_immediately(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        Checkpoints(tmp_path).save(1, small_model(), state={"tensor": torch.ones(2)})


def test_rng_false_does_not_change_the_generators(tmp_path: Path) -> None:
    save_one(tmp_path, 1, small_model())
    model = small_model()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    Checkpoints(tmp_path).load(model, rng=False)
    assert torch.equal(torch.rand(3), expected)


def test_an_exception_in_the_training_abandons_a_save_that_waits_for_other_ranks(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Checkpoints, "_write_tensors", lambda *_: None)
    with pytest.raises(KeyError), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small_model())
        raise KeyError("the training fails")
    assert saved_steps(tmp_path) == []


def test_a_rank_that_does_not_write_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Checkpoints, "_write_tensors", lambda *_: None)
    checkpoints = Checkpoints(tmp_path, timeout=0.1)
    checkpoints.save(1, small_model())
    checkpoints.wait()
    assert "had not written their files after 0 s: 0" in checkpoints.failed[1]
    assert not list(tmp_path.glob("step-*"))
