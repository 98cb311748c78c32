"""The catalogue of accelerators and links: every figure has a source, unknown devices have none."""

import pytest

from tutti.machine.hardware_catalogue import accelerator, catalogue, figure, link, peak_flops

G, M, K = 1 << 30, 1 << 20, 1 << 10


def test_every_entry_has_a_source_and_a_unique_name() -> None:
    whole = catalogue()
    entries = [*whole.accelerators, *whole.links, *whole.figures]
    assert all(each.source for each in entries)
    names = [each.name for each in whole.accelerators]
    assert len(set(names)) == len(names)
    for each in whole.accelerators:
        assert accelerator(each.name) is each, "a longer name must come before a shorter one"
        assert each.host_link is None or link(each.host_link) is not None
    for each in whole.figures:
        assert set(each.devices) <= set(names) and each.gbs > 0
    for each in whole.links:
        assert each.achieved_gbs is None or each.achieved_gbs <= each.gbs


def test_figures_are_below_the_speed_of_their_links() -> None:
    for each in catalogue().figures:
        for name in each.devices:
            device = accelerator(name)
            assert device is not None
            if each.op == "pair":
                assert device.scale_up_gbs is not None and each.gbs <= device.scale_up_gbs
            if each.op.endswith(("to device", "to host")):
                host_link = link(device.host_link)
                assert host_link is not None and each.gbs <= host_link.gbs


@pytest.mark.parametrize(
    ("driver_name", "name", "bf16"),
    [
        ("NVIDIA GB200", "GB200", 2500),
        ("NVIDIA B200", "B200", 2250),
        ("NVIDIA GH200 480GB", "GH200", 989),
        ("NVIDIA H200", "H200", 989),
        ("NVIDIA H100 80GB HBM3", "H100", 989),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4", 312),
        ("NVIDIA A100-PCIE-40GB", "A100", 312),
        ("Tesla V100-SXM2-16GB", "V100-SXM2", 125),
        ("AMD Instinct MI300X", "MI300X", 1307),
    ],
)
def test_a_device_is_found_by_the_name_that_the_driver_reports(
    driver_name: str, name: str, bf16: float
) -> None:
    known = accelerator(driver_name)
    assert known is not None and known.name == name
    assert peak_flops(driver_name, "bf16") == (
        bf16 * 1e12,
        f"{name} data sheet, bf16 dense, {bf16:g} TFLOP/s",
    )


@pytest.mark.parametrize("name", ["NVIDIA RTX 9999", "cpu", "NVIDIA H100 NVL", "NVIDIA H200 NVL"])
def test_an_unlisted_device_has_no_figures(name: str) -> None:
    assert accelerator(name) is None and peak_flops(name, "bf16") is None
    assert figure(name, "pair", G) is None


def test_the_float32_peak_depends_on_tf32() -> None:
    assert peak_flops("NVIDIA H200", "float32", tf32=True) == (
        494.5e12,
        "H200 data sheet, tf32 dense, 494.5 TFLOP/s",
    )
    assert peak_flops("NVIDIA H200", "float32") == (67e12, "H200 data sheet, fp32, 67 TFLOP/s")
    # a V100 has no TF32, even if torch allows it
    volta = peak_flops("Tesla V100-SXM2-16GB", "float32", tf32=True)
    assert volta is not None and volta[0] == 15.7e12
    assert peak_flops("NVIDIA H200", "int3") is None


def test_a_figure_is_for_the_same_or_the_next_smaller_size() -> None:
    def busbw(size: int, ranks: int = 8, timing: str = "back-to-back") -> float | None:
        found = figure("NVIDIA H200", "all_reduce", size, ranks, timing)
        return None if found is None else found.gbs

    assert busbw(16 * G) == 482.3 and busbw(32 * G) == 482.3
    assert busbw(128 * M) == 412 and busbw(255 * M) == 412
    assert busbw(K) is None, "no figure for a message this small"
    assert busbw(16 * M, timing="isolated") == 219.9
    assert busbw(16 * G, ranks=3) is None, "no figure for three ranks"
    both = figure("NVIDIA A100-SXM4-80GB", "pair", G)
    assert both is not None and both.gbs == 276
    assert figure("NVIDIA H100 PCIe", "pair", G) is None, "the PCIe card has no NVLink"
    assert figure("NVIDIA H200", "pair", M) is None, "the figure is for large messages"
