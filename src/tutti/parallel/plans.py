"""Plan: what each layer of a model becomes when its matrices are split over tp.

A plan is a dict from names of modules to roles; `*` stands for one part of a name:

    {"embed": "vocabulary", "blocks.*.attention.wq": "column", "blocks.*.attention.wo": "row"}

Two matrices in a row are split so that nothing need be exchanged between them: the first by its
columns, the second by its rows. Each rank then computes a part of the sum that is the result.

                 ┌ A₁ ┐                       X A₁ → ReLU → · B₁ ┐
    X · [A₁ A₂]  │    │ · [B₁; B₂]    rank 0: X A₁ … B₁          ├ + → result
                 └ A₂ ┘               rank 1: X A₂ … B₂          ┘

What is not in the plan is computed by every tp rank alike.
"""

import re
from collections.abc import Mapping
from typing import Literal, get_args

from torch import nn

from tutti.world.errors import UsageError, did_you_mean

Role = Literal["vocabulary", "norm", "input", "column", "row", "head"]
"""vocabulary: an embedding, split by words. norm: works on a part of the sequence. input: a module
that needs the whole sequence, such as attention: gathered once for all its columns. column, row: a
linear layer split by outputs or by inputs. head: split by outputs, which are words."""
Plan = Mapping[str, Role]

# How common transformers name their layers; the last part of a name decides.
_USUAL: dict[str, Role] = {
    **dict.fromkeys(
        ("wq", "wk", "wv", "q_proj", "k_proj", "v_proj", "query", "key", "value"), "column"
    ),
    **dict.fromkeys(("gate", "up", "gate_proj", "up_proj", "w1", "w3", "fc1", "linear1"), "column"),
    **dict.fromkeys(
        ("wo", "o_proj", "out_proj", "down", "down_proj", "w2", "fc2", "linear2"), "row"
    ),
    **dict.fromkeys(("embed", "embed_tokens", "tok_embeddings", "wte"), "vocabulary"),
    **dict.fromkeys(("head", "lm_head", "output"), "head"),
}
_KINDS: dict[Role, tuple[type[nn.Module], ...]] = {
    "vocabulary": (nn.Embedding,),
    "norm": (nn.LayerNorm, nn.RMSNorm),
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "head": (nn.Linear,),
}


def default_plan(model: nn.Module) -> dict[str, Role]:
    """A plan by the usual names of a transformer's layers; UsageError where none are found."""
    plan: dict[str, Role] = {}
    for name, module in model.named_modules():
        role = _USUAL.get(name.rpartition(".")[2])
        if role is not None and isinstance(module, _KINDS[role]):
            plan[name] = role
    columns = [name for name, role in plan.items() if role == "column"]
    if not columns or "row" not in plan.values():
        raise UsageError(
            f"no layer of {type(model).__name__} has a name that says how to split it over tp: "
            'give a plan, such as {"layers.*.up": "column", "layers.*.down": "row"}, or use '
            "shard or dp instead of tp"
        )
    if {"vocabulary", "head"} <= set(plan.values()):
        # From the embedding to the head the stream can be split along the sequence.
        parents = {name.rpartition(".")[0] for name in columns}
        plan |= dict.fromkeys(parents - {""}, "input")
        for name, module in model.named_modules():
            if isinstance(module, _KINDS["norm"]) and not _inside(name, parents):
                plan[name] = "norm"
    return plan


def resolve(plan: Plan, model: nn.Module) -> dict[str, Role]:
    """The plan with every `*` replaced by the names there are; a name without a module is refused.

    Give it the whole model, before a pipeline takes layers away.
    """
    names = [name for name, _ in model.named_modules() if name]
    resolved: dict[str, Role] = {}
    for pattern, role in plan.items():
        if role not in get_args(Role):
            raise UsageError(
                f"plan: {pattern!r} has role {role!r}: {did_you_mean(role, get_args(Role))}"
            )
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        found = [name for name in names if expression.fullmatch(name)]
        if not found:
            known = dict.fromkeys(
                re.sub(r"\b\d+\b", "*", n) if "*" in pattern else n for n in names
            )
            raise UsageError(
                f"plan: {type(model).__name__} has no module {pattern!r}: "
                f"{did_you_mean(pattern, known)}"
            )
        for name in found:
            kinds = _KINDS.get(role)
            module = model.get_submodule(name)
            if kinds is not None and not isinstance(module, kinds):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise UsageError(
                    f"plan: {name} is a {type(module).__name__}, role {role!r} is for {wanted}"
                )
            resolved[name] = role
    return resolved


def check_divides(plan: Mapping[str, Role], model: nn.Module, tp: int) -> None:
    """Raise UsageError, with the equation and the nearest choice, where tp cuts through a unit."""
    for name, role in plan.items():
        module = model.get_submodule(name)
        if role == "vocabulary":
            assert isinstance(module, nn.Embedding)
            _must_divide(tp, module.num_embeddings, "words", name)
        elif role in ("column", "row", "head"):
            assert isinstance(module, nn.Linear)
            width = module.in_features if role == "row" else module.out_features
            # A head of attention is computed on one rank: it may not be cut.
            parent = model.get_submodule(name.rpartition(".")[0])
            head_dim = getattr(parent, "head_dim", None)
            if isinstance(head_dim, int) and width % head_dim == 0:
                _must_divide(tp, width // head_dim, "heads", name)
            else:
                what = {"row": "inputs", "head": "words"}.get(role, "outputs")
                _must_divide(tp, width, what, name)


def _must_divide(tp: int, count: int, what: str, name: str) -> None:
    if count % tp:
        right = [str(n) for n in range(1, count + 1) if count % n == 0 and n <= 2 * tp]
        raise UsageError(
            f"layout tp{tp} does not divide the {count} {what} of {name}: {count} / {tp} = "
            f"{count / tp:.4g}: use tp{' or tp'.join(right[-2:])}"
        )


def _inside(name: str, parents: set[str]) -> bool:
    return any(name.startswith(f"{parent}.") for parent in parents if parent)
