"""parallel, train, parity and predict reach other ranks through tutti.comm only."""

import ast
from pathlib import Path

import tutti

_ROOMS = ("parallel", "train", "parity", "predict")
_COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "broadcast", "broadcast_object_list", "barrier"),
    *("all_to_all", "all_to_all_single", "gather", "gather_object", "scatter", "monitored_barrier"),
    *("scatter_object_list", "send", "recv", "isend", "irecv", "batch_isend_irecv", "P2POp"),
}


def _direct_collectives(path: Path) -> list[str]:
    """Uses of torch.distributed's collectives, as `dist.name` or imported by name."""
    tree = ast.parse(path.read_text())
    modules = {
        alias.asname or "torch.distributed"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "torch.distributed"
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _COLLECTIVES:
            if ast.unparse(node.value) in modules | {"torch.distributed"}:
                found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            names = [alias.name for alias in node.names if alias.name in _COLLECTIVES]
            found += [f"{path.name}:{node.lineno} {name}" for name in names]
    return found


def test_no_direct_collectives_outside_comm() -> None:
    source = Path(tutti.__file__).parent
    files = [path for room in _ROOMS for path in sorted((source / room).rglob("*.py"))]
    assert len(files) > 30
    assert not [use for path in files for use in _direct_collectives(path)]


def test_a_direct_collective_would_be_found(tmp_path: Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(
        "import torch\nimport torch.distributed as dist\n"
        "from torch.distributed import barrier\n"
        "dist.all_reduce(x)\ntorch.distributed.send(x, 1)\nother.reduce(x)\n"
    )
    assert len(_direct_collectives(script)) == 3
