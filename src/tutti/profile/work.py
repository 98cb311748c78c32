"""How much was computed, as far as events tell: a measure to compare ranks by, not flops."""

import math
from typing import Any

# Of operators, those whose sizes tell how much was computed.
_HEAVY = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"),
    *("aten::convolution_backward", "aten::_scaled_dot_product_flash_attention_for_cpu"),
}


def products(name: str, arguments: dict[str, Any]) -> int:
    """Multiplications of a product of matrices, or about those of a convolution."""
    if name not in _HEAVY:
        return 0
    dims = arguments.get("Input Dims") or []
    shapes = [d for d in dims[:3] if len(d) > 1 and all(isinstance(each, int) for each in d)]
    if len(shapes) < 2:
        return 0
    if "convolution" in name:  # input or its gradient, and the weight without its outputs
        return int(math.prod(shapes[0]) * math.prod(shapes[-1][1:]))
    return int(math.prod(shapes[-2]) * shapes[-1][-1])


def threads(arguments: dict[str, Any]) -> int:
    """Threads of a kernel."""
    grid, block = arguments.get("grid") or [0], arguments.get("block") or [0]
    return int(math.prod(grid) * math.prod(block))
