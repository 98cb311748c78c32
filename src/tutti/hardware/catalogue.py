"""What accelerators can do by their data sheets: dense, without sparsity, in TFLOP/s."""

# Name as the driver gives it (a part of it), and TFLOP/s for bf16 or fp16, tf32 and fp32.
# The first entry whose name is part of the device's counts: longer names come first.
_PEAKS: tuple[tuple[str, float, float | None, float], ...] = (
    ("GB300", 2500, 1250, 80),
    ("GB200", 2500, 1250, 80),
    ("B300", 2250, 1125, 80),
    ("B200", 2250, 1125, 80),
    ("GH200", 989, 494.5, 67),
    ("H200", 989, 494.5, 67),
    ("H100 PCIe", 756, 378, 51),
    ("H100", 989, 494.5, 67),
    ("A100", 312, 156, 19.5),
    ("V100", 125, None, 15.7),
    ("MI355X", 2500, None, 157.3),
    ("MI325X", 1307, 653.7, 163.4),
    ("MI300X", 1307, 653.7, 163.4),
)


def peak_flops(device_name: str, precision: str, tf32: bool = False) -> tuple[float, str] | None:
    """FLOP/s that a device can do at best, and where the figure is from; None if it is unknown.

    An unknown device has no peak: a guess would make every figure derived from it wrong.
    """
    for name, half, with_tf32, single in _PEAKS:
        if name in device_name:
            if precision in ("bf16", "fp16"):
                return half * 1e12, f"{name} data sheet, {precision} dense, {half:g} TFLOP/s"
            if precision == "float32" and tf32 and with_tf32 is not None:
                return with_tf32 * 1e12, f"{name} data sheet, tf32 dense, {with_tf32:g} TFLOP/s"
            if precision == "float32":
                return single * 1e12, f"{name} data sheet, fp32, {single:g} TFLOP/s"
    return None
