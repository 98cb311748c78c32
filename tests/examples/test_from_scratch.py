"""The from-scratch lesson: many devices compute what one does, in PyTorch and in MXNet.

Whole trainings are compared in float64, relative to the largest value of each tensor, to 1e-10: the
order of additions costs about 1e-15. In float32 rounding may move a value across ReLU's kink, which
changes a gradient by more than rounding, so there only single steps are compared.
"""

import ast
import gzip
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
LESSON = ROOT / "examples" / "from_scratch"
sys.path.insert(0, str(LESSON))
lesson = importlib.import_module("lesson")
scratch = importlib.import_module("from_scratch_torch")

MXNET_HOME = ROOT / ".venv-mxnet"
MXNET_REQUIREMENTS = LESSON / "requirements-mxnet.txt"
IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# 258 = 4 × 64 + 2: the last batch is too short for three devices.
TRAINING = {"batch_size": 64, "lr": 0.1, "epochs": 2, "dtype": "float64"}
TRAIN_WITH_MXNET = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
import from_scratch_mxnet
from lesson import load_images

images = load_images(Path(sys.argv[2]))
for run in json.loads(sys.argv[4]):
    params, history = from_scratch_mxnet.train(images=images, **run["training"])
    params = [p.asnumpy() for p in params]
    np.savez(Path(sys.argv[3]) / run["name"], *params, losses=[epoch.loss for epoch in history])
"""


@pytest.fixture(autouse=True)
def gpus_are_hidden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture(scope="module")
def idx_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up images in Fashion-MNIST's format."""
    rng = np.random.default_rng(7)
    patterns = np.kron(rng.integers(0, 200, (10, 7, 7)), np.ones((1, 4, 4)))
    directory = tmp_path_factory.mktemp("idx")
    for samples, names in ((258, IDX_NAMES[:2]), (50, IDX_NAMES[2:])):
        y = rng.integers(0, 10, samples)
        x = patterns[y] + rng.integers(0, 56, (samples, 28, 28))
        for name, array in zip(names, (x, y), strict=True):
            head = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
            (directory / name).write_bytes(head + array.astype(np.uint8).tobytes())
    return directory


def images_of(samples: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(3)
    x = torch.tensor(rng.standard_normal((samples, 1, 28, 28)))
    return x, torch.tensor(rng.integers(0, 10, samples))


def replicas(count: int, dtype: torch.dtype = torch.float64) -> tuple[list, list[list[Tensor]]]:
    devices = scratch.get_devices(count)
    params = [torch.tensor(p, dtype=dtype) for p in lesson.first_params(seed=0)]
    return devices, [scratch.get_params(params, device) for device in devices]


def difference(found: list, expected: list) -> float:
    """The largest difference, relative to the largest value of the tensor it is in."""
    pairs = [
        (
            np.asarray(torch.as_tensor(f).detach().cpu()),
            np.asarray(torch.as_tensor(e).detach().cpu()),
        )
        for f, e in zip(found, expected, strict=True)
    ]
    return max(float(np.abs(f - e).max() / np.abs(e).max()) for f, e in pairs)


def test_both_files_have_the_same_functions_in_the_same_order() -> None:
    def functions(file: str) -> list[tuple[str, list[str]]]:
        body = ast.parse((LESSON / file).read_text()).body
        found = [node for node in body if isinstance(node, ast.FunctionDef)]
        return [(node.name, [arg.arg for arg in node.args.args]) for node in found]

    assert functions("from_scratch_torch.py") == functions("from_scratch_mxnet.py")


def test_a_copy_on_the_same_device_is_still_a_copy() -> None:
    _, (first, second) = replicas(2)
    with torch.no_grad():
        first[0].zero_()
    assert second[0].abs().max() > 0
    assert all(p.requires_grad and p.grad is not None and not p.grad.any() for p in second)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_allreduce_leaves_the_sum_in_place_on_every_device(count: int) -> None:
    tensors = [torch.full((2, 3), 10.0**i) for i in range(count)]
    places = [tensor.data_ptr() for tensor in tensors]
    scratch.allreduce(tensors)
    assert all(torch.equal(t, torch.full((2, 3), (10.0**count - 1) / 9)) for t in tensors)
    assert [tensor.data_ptr() for tensor in tensors] == places


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_grouped_and_naive_allreduce_are_equal_bit_for_bit(count: int) -> None:
    torch.manual_seed(0)
    groups = [[torch.randn(shape) for shape in ((20, 1, 5, 5), (20,), ())] for _ in range(count)]
    naive = [[tensor.clone() for tensor in group] for group in groups]
    for same_position in zip(*naive, strict=True):
        scratch.allreduce(list(same_position))
    scratch.allreduce_grouped(groups)
    for group, expected in zip(groups, naive, strict=True):
        assert all(torch.equal(g, e) for g, e in zip(group, expected, strict=True))


@pytest.mark.parametrize(
    ("samples", "count", "sizes"),
    [(8, 2, [4, 4]), (10, 3, [4, 3, 3]), (5, 4, [2, 1, 1, 1]), (2, 4, [1, 1])],
)
def test_a_batch_is_split_without_losing_or_doubling_a_sample(
    samples: int, count: int, sizes: list[int]
) -> None:
    x, y = images_of(samples)
    parts = scratch.split_batch(x, y, scratch.get_devices(count))
    assert [len(part_y) for _, part_y in parts] == sizes
    assert torch.equal(torch.cat([part_x for part_x, _ in parts]), x)
    assert torch.equal(torch.cat([part_y for _, part_y in parts]), y)


@pytest.mark.parametrize("naive", [False, True], ids=["grouped", "naive"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_steps_are_those_of_torch_sgd_on_whole_batches(count: int, naive: bool) -> None:
    devices, device_params = replicas(count)
    model = nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    ).double()
    with torch.no_grad():
        for own, first in zip(model.parameters(), device_params[0], strict=True):
            own.copy_(first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for samples in (10, 3, 10):  # uneven, then fewer samples than four devices
        x, y = images_of(samples)
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(model(x), y)
        expected.backward()
        optimizer.step()
        loss = scratch.train_batch(x, y, device_params, devices, 0.1, naive)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-10)

    assert difference(device_params[0], list(model.parameters())) < 1e-10
    for params in device_params[1:]:
        assert all(torch.equal(p, q) for p, q in zip(params, device_params[0], strict=True))


def test_in_float32_one_step_on_many_devices_is_that_of_one() -> None:
    x, y = images_of(10)
    results = []
    for count in (1, 2, 4):
        devices, device_params = replicas(count, torch.float32)
        scratch.train_batch(x.float(), y, device_params, devices, lr=0.1)
        results.append(device_params[0])
    assert difference(results[1], results[0]) < 1e-4
    assert difference(results[2], results[0]) < 1e-4


def test_training_on_many_devices_gives_the_parameters_of_one(idx_directory: Path) -> None:
    images = lesson.load_images(idx_directory)
    one, history = scratch.train(1, images=images, **TRAINING)
    assert history[-1].loss < history[0].loss
    for count in (2, 3, 4):
        many, many_history = scratch.train(count, images=images, **TRAINING)
        assert difference(many, one) < 1e-10
        assert [epoch.accuracy for epoch in many_history] == [epoch.accuracy for epoch in history]


@pytest.mark.gpu
def test_replicas_on_gpus_give_the_parameters_of_one_device(idx_directory: Path) -> None:
    images = lesson.load_images(idx_directory)
    one, _ = scratch.train(1, images=images, **TRAINING)
    assert one[0].device.type == "cuda"
    for count in (2, 3):
        many, _ = scratch.train(count, images=images, **TRAINING)
        assert difference(many, one) < 1e-10


def test_the_command_learns_the_digits() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn, whose digits are the data, is not here")
    command = ["from_scratch_torch.py", "--devices", "2", "--batch", "64", "--epochs", "5"]
    losses, accuracies = losses_and_accuracies(Path(sys.executable), command)
    assert len(losses) == 5 and losses[-1] < losses[0] / 4
    assert accuracies[-1] > 90


def losses_and_accuracies(python: Path, command: list[str]) -> tuple[list[float], list[float]]:
    done = run([str(python), str(LESSON / command[0]), *command[1:]])
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^epoch \d+  loss ([\d.]+)  test accuracy ([\d.]+)%", done.stdout, re.M)
    return [float(loss) for loss, _ in found], [float(accuracy) for _, accuracy in found]


def run(command: list[str], timeout: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def test_gzipped_files_are_read_like_plain_ones(idx_directory: Path, tmp_path: Path) -> None:
    for name in IDX_NAMES:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((idx_directory / name).read_bytes()))
    plain, zipped = lesson.load_images(idx_directory), lesson.load_images(tmp_path)
    assert all(np.array_equal(p, z) for p, z in zip(plain[:4], zipped[:4], strict=True))
    assert abs(plain.train_x.mean()) < 1e-3 and abs(plain.train_x.std() - 1) < 1e-3


def test_made_up_images_serve_where_scikit_learn_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    images = lesson.load_images()
    assert "made-up" in images.source
    _, history = scratch.train(2, 128, 0.1, 2, images)
    assert history[-1].accuracy > 0.9


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "0"], "--devices: must be at least 1, got 0"),
        (["--batch", "-4"], "--batch: must be at least 1, got -4"),
        (["--lr", "nan"], "--lr: must be above 0 and finite, got nan"),
        (["--data", "MISSING"], "has no train-images-idx3-ubyte (nor train-images-idx3-ubyte.gz)"),
        (["--data", "SHORT"], "bytes of data, its header says 202272"),
        (["--data", "OTHER"], "is not an IDX file of bytes with 3 dims"),
        (["--data", "BROKEN"], "train-images-idx3-ubyte.gz cannot be read"),
        (["--data", "SWAPPED"], "train has images (258, 28, 28) and 50 labels"),
    ],
)
def test_wrong_input_is_answered_with_exit_code_2_and_the_reason(
    flags: list[str],
    message: str,
    idx_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = tmp_path / flags[1]
    if flags[1].isupper() and flags[1] != "MISSING":
        shutil.copytree(idx_directory, directory)
        train_images = directory / IDX_NAMES[0]
        if flags[1] == "SHORT":
            train_images.write_bytes(train_images.read_bytes()[:-1])
        elif flags[1] == "OTHER":
            train_images.write_bytes(b"P5 28 28 255 and then pixels")
        elif flags[1] == "BROKEN":
            train_images.unlink()
            (directory / f"{IDX_NAMES[0]}.gz").write_bytes(gzip.compress(b"images")[:-9])
        elif flags[1] == "SWAPPED":
            shutil.copy(directory / IDX_NAMES[3], directory / IDX_NAMES[1])
    value = str(directory) if flags[0] == "--data" else flags[1]
    monkeypatch.setattr(sys, "argv", ["lesson", flags[0], value])
    with pytest.raises(SystemExit) as stopped:
        lesson.flags("")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def mxnet_python() -> Path:
    """The interpreter of MXNet's own environment, which is made on first use and then kept."""
    python, ready = MXNET_HOME / "bin" / "python", MXNET_HOME / "ready"
    wanted = MXNET_REQUIREMENTS.read_text()
    if not (python.exists() and ready.exists() and ready.read_text() == wanted):
        # numpy 1.23.5 has wheels up to Python 3.11.
        base = sys.executable if sys.version_info < (3, 12) else shutil.which("python3.11")
        if base is None:
            pytest.skip("pip has no numpy 1.23.5 for this Python, and there is no python3.11")
        made = run([base, "-m", "venv", "--clear", str(MXNET_HOME)])
        assert made.returncode == 0, made.stdout + made.stderr
        install = [str(python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        try:
            done = run([*install, "--retries", "2", "-r", str(MXNET_REQUIREMENTS)], timeout=400)
        except subprocess.TimeoutExpired:
            pytest.skip("pip did not get MXNet 1.9.1 and numpy 1.23.5 within 400 s")
        if "No matching distribution found" in done.stderr or "onnection" in done.stderr:
            pytest.skip(f"pip cannot get MXNet's packages: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        ready.write_text(wanted)
    loaded = run(
        [str(python), "-c", "import mxnet, numpy; print(mxnet.__version__, numpy.__version__)"]
    )
    assert loaded.returncode == 0, f"on Debian: apt install libgomp1 libquadmath0\n{loaded.stderr}"
    assert loaded.stdout.split() == ["1.9.1", "1.23.5"]
    return python


@pytest.mark.timeout(600)
def test_mxnet_on_many_devices_gives_the_parameters_of_one_and_of_pytorch(
    mxnet_python: Path, idx_directory: Path, tmp_path: Path
) -> None:
    runs = [
        {
            "name": f"{count}{'naive' * naive}",
            "training": {**TRAINING, "num_devices": count, "naive": naive},
        }
        for count, naive in ((1, False), (2, False), (2, True), (3, False))
    ]
    command = [LESSON, idx_directory, tmp_path, json.dumps(runs)]
    done = run([str(mxnet_python), "-c", TRAIN_WITH_MXNET, *map(str, command)])
    assert done.returncode == 0, done.stderr
    found = {name: dict(np.load(tmp_path / f"{name}.npz")) for name in ("1", "2", "2naive", "3")}
    losses = {name: arrays.pop("losses") for name, arrays in found.items()}
    params = {name: list(arrays.values()) for name, arrays in found.items()}

    assert losses["2"][-1] < losses["2"][0]
    assert difference(params["2"], params["1"]) < 1e-10
    assert difference(params["3"], params["1"]) < 1e-10
    assert all(np.array_equal(p, q) for p, q in zip(params["2naive"], params["2"], strict=True))

    with_torch, history = scratch.train(2, images=lesson.load_images(idx_directory), **TRAINING)
    assert difference(params["2"], with_torch) < 1e-10
    assert losses["2"] == pytest.approx([epoch.loss for epoch in history], rel=1e-10)


@pytest.mark.timeout(600)
def test_the_mxnet_command_learns(mxnet_python: Path, idx_directory: Path) -> None:
    command = ["from_scratch_mxnet.py", "--devices", "2", "--batch", "32", "--epochs", "3"]
    command += ["--data", str(idx_directory)]
    losses, accuracies = losses_and_accuracies(mxnet_python, command)
    assert len(losses) == 3 and losses[-1] < losses[0] / 4
    assert accuracies[-1] > 90
