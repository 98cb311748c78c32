"""Batches on a GPU: pinned memory, copy stream, data on the device, gathers in a CUDA graph."""

import threading

import pytest
import torch
from torch import Tensor

from tutti.data import Loader, TensorSamples, TokenSamples, evaluation_loader, synthetic_dataset
from tutti.data.image_datasets import Standardise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def images(count: int) -> TensorSamples:
    pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
    transform = Standardise((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    return TensorSamples(pixels, torch.arange(count), transform)


def close(actual: Tensor, expected: Tensor) -> None:
    # Two roundings in float32 on values up to 6; the GPU may fuse them into one.
    torch.testing.assert_close(actual.cpu(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 0},
        {"prefetch": 3},
        {"workers": 2},
        {"data_on_device": True},
        {"data_on_device": True, "prefetch": 2},
    ],
)
def test_the_gpu_gets_the_batches_that_the_cpu_gets(options: dict[str, int]) -> None:
    samples = images(333)
    on_cpu = Loader(samples, 32, drop_last=False)
    on_gpu = Loader(samples, 32, drop_last=False, device="cuda", **options)  # type: ignore[arg-type]
    for actual, expected in zip(on_gpu, on_cpu, strict=True):
        assert actual.inputs.device.type == actual.targets.device.type == "cuda"
        close(actual.inputs, expected.inputs)
        assert actual.targets.tolist() == expected.targets.tolist()
        assert actual.after == expected.after
    assert not [t for t in threading.enumerate() if t.name.startswith("tutti-data")]


def test_a_slow_step_never_reads_memory_that_the_next_copy_wrote() -> None:
    samples = TensorSamples(
        torch.arange(4096).float().view(-1, 1).expand(-1, 4096), torch.zeros(4096)
    )
    loader = Loader(samples, 64, device="cuda", prefetch=2)
    busy = torch.randn(4096, 4096, device="cuda")
    sums, expected = [], []
    for part, batch in zip(Loader(samples, 64).indices(1), loader, strict=True):
        for _ in range(3):
            busy = (busy @ busy).clamp(-1, 1)  # the GPU falls behind, the thread runs ahead
        sums.append((batch.inputs + 0 * busy[:64]).double().sum())
        expected.append(4096.0 * part.indices.double().sum())
        del batch
    torch.testing.assert_close(torch.stack(sums).cpu(), torch.stack(expected), rtol=1e-9, atol=0)


def test_a_step_on_another_stream_waits_for_its_batch() -> None:
    samples = images(512)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        means = [batch.inputs.mean() for batch in Loader(samples, 64, device="cuda", prefetch=2)]
    side.synchronize()
    for actual, batch in zip(means, Loader(samples, 64), strict=True):
        close(actual, batch.inputs.mean())


def test_a_step_can_gather_resident_data_inside_a_cuda_graph() -> None:
    samples = images(256)
    loader = Loader(samples, 32, device="cuda", data_on_device=True)
    indices = torch.zeros(32, dtype=torch.int64, device="cuda")
    loader.samples.batch(indices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs, targets = loader.samples.batch(indices)
    for part, batch in zip(loader.indices(1), Loader(samples, 32), strict=True):
        indices.copy_(part.indices)
        graph.replay()
        close(inputs, batch.inputs)
        assert targets.tolist() == batch.targets.tolist()


def test_a_graph_is_captured_while_the_thread_copies() -> None:
    stream = Loader(images(4096), 32, device="cuda", prefetch=4).stream()
    static = next(stream).inputs.clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        doubled = static * 2
    for _ in range(20):
        batch = next(stream)
        static.copy_(batch.inputs)
        graph.replay()
        assert torch.equal(doubled, batch.inputs * 2)
    stream.close()


def test_tokens_synthetic_data_and_empty_batches_reach_the_gpu() -> None:
    tokens = TokenSamples((torch.arange(1001) * 60).numpy().astype("uint16"), 10, 65536, "t")
    for samples in (tokens, synthetic_dataset((3, 8, 8), 10, size=100).train):
        for resident in (False, True):
            on_gpu = Loader(samples, 16, device="cuda", data_on_device=resident)
            for actual, expected in zip(on_gpu, Loader(samples, 16), strict=True):
                assert torch.equal(actual.inputs.cpu(), expected.inputs)
                assert torch.equal(actual.targets.cpu(), expected.targets)
    for resident in (False, True):
        loader = evaluation_loader(
            images(1), 4, rank=1, ranks=2, device="cuda", data_on_device=resident
        )
        (batch,) = loader
        assert batch.inputs.shape == (0, 3, 32, 32)
        assert batch.global_count == 1
