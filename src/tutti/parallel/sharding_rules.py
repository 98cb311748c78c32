"""Sharding rules: how each layer of a model is split over tp.

The rules are a dict from module names to roles; `*` stands for one part of a name:

    {"embed": "vocabulary", "blocks.*.attention.wq": "column", "blocks.*.attention.wo": "row"}

Two consecutive matrices are split so that no communication is needed between them: A by columns,
A = [A₁ A₂], and B by rows, B = [B₁; B₂]. Each rank computes one term of the result:

    rank 0:   X · A₁ → ReLU → · B₁ ┐
                                   ├ + → result
    rank 1:   X · A₂ → ReLU → · B₂ ┘

Layers without a rule are not split: every tp rank computes them on the whole activations.
"""

import re
from collections.abc import Mapping
from typing import Literal, get_args

from torch import nn

from tutti.parallel.layout import check_divides
from tutti.world.errors import UsageError, did_you_mean

Role = Literal["vocabulary", "norm", "whole", "input", "column", "row", "head"]
"""vocabulary: an embedding, split along the vocabulary. norm: a norm, applied to a part of the
sequence. whole: any other layer between split layers, computed by every rank. input: a module that
needs the whole sequence, such as attention; its input is gathered once for all its column layers.
column: a linear layer split by outputs. row: a linear layer split by inputs. head: a linear layer
split by outputs, which are the vocabulary."""
ShardingRules = Mapping[str, Role]

# Layer names of common transformers, compared with the last part of a module's name.
_USUAL_NAMES: dict[Role, str] = {
    "column": "wq wk wv q_proj k_proj v_proj query key value "
    "gate up gate_proj up_proj w1 w3 fc1 linear1",
    "row": "wo o_proj out_proj down down_proj w2 fc2 linear2",
    "vocabulary": "embed embed_tokens tok_embeddings wte",
    "head": "head lm_head output",
}
_KINDS: dict[Role, tuple[type[nn.Module], ...]] = {
    "vocabulary": (nn.Embedding,),
    "norm": (nn.LayerNorm, nn.RMSNorm),
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "head": (nn.Linear,),
}


def default_rules(model: nn.Module) -> dict[str, Role]:
    """Return rules for the usual layer names. Raise UsageError if the model has no such layers."""
    roles = {name: role for role, names in _USUAL_NAMES.items() for name in names.split()}
    rules: dict[str, Role] = {}
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        role = roles.get(last)
        if role is None or not isinstance(module, _KINDS[role]):
            continue
        # MultiheadAttention reads the weights of its layers and does not call them.
        if not isinstance(model.get_submodule(parent), nn.MultiheadAttention):
            rules[name] = role
    with_columns = _parents(rules, "column")
    # The input of a row layer is split only if a column layer precedes it.
    for parent, name in [(n.rpartition(".")[0], n) for n, role in rules.items() if role == "row"]:
        if parent not in with_columns:
            del rules[name]
    if not with_columns or "row" not in rules.values():
        raise UsageError(
            f"no layer of {type(model).__name__} has a usual name, so tp needs rules: give rules, "
            'such as {"layers.*.up": "column", "layers.*.down": "row"}, or use shard or dp '
            "instead of tp"
        )
    if {"vocabulary", "head"} <= set(rules.values()):
        # Between the embedding and the head, activations can be split along the sequence. A module
        # that has only column and row layers gathers its input once for all its column layers. In a
        # module that also has norms, each column layer gathers its own input.
        inputs = {parent for parent in with_columns if not _uncovered(model, rules, parent)} - {""}
        rules |= dict.fromkeys(inputs, "input")
        inside = tuple(f"{parent}." for parent in inputs)
        for name, module in model.named_modules():
            if isinstance(module, _KINDS["norm"]) and not name.startswith(inside):
                rules[name] = "norm"
    return rules


def resolve_rules(rules: ShardingRules, model: nn.Module) -> dict[str, Role]:
    """Return the rules with each `*` expanded. Raise UsageError if a name has no module."""
    names = [name for name, _ in model.named_modules() if name]
    resolved: dict[str, Role] = {}
    for pattern, role in rules.items():
        if role not in get_args(Role):
            raise UsageError(
                f"the sharding rules give {pattern!r} the unknown role {role!r}: "
                f"{did_you_mean(role, get_args(Role))}"
            )
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matches = [name for name in names if expression.fullmatch(name)]
        if not matches:
            patterns = dict.fromkeys(
                re.sub(r"\b\d+\b", "*", n) if "*" in pattern else n for n in names
            )
            raise UsageError(
                f"{type(model).__name__} has no module {pattern!r}, which the sharding rules name: "
                f"{did_you_mean(pattern, patterns)}"
            )
        for name in matches:
            kinds = _KINDS.get(role)
            module = model.get_submodule(name)
            if kinds is not None and not isinstance(module, kinds):
                names_of_kinds = " or ".join(kind.__name__ for kind in kinds)
                raise UsageError(
                    f"sharding rules: {name} is a {type(module).__name__}, but role {role!r} needs "
                    f"a {names_of_kinds}"
                )
            resolved[name] = role
    return resolved


def splits_sequence(rules: Mapping[str, Role], model: nn.Module) -> bool:
    """Return whether activations can be split along the sequence.

    This requires rules for the embedding, the head and every layer between them.
    """
    return {"vocabulary", "norm", "head"} <= set(rules.values()) and not _uncovered(model, rules)


def check_between(rules: Mapping[str, Role], model: nn.Module) -> None:
    """Raise UsageError if a layer without a rule may lie between split layers.

    Such a layer would get only this rank's heads or channels, and only a part of its gradient.
    """
    for parent in sorted(_parents(rules, "column") & _parents(rules, "row") - {""}):
        for name in _uncovered(model, rules, parent):
            raise UsageError(
                f"sharding rules: {name} has no role, but is inside {parent}, whose layers are "
                'split over tp. Use the role "norm" or "whole" for whole activations. If the layer '
                f"works on heads, leave {parent} out of the rules or use shard instead of tp"
            )


def check_rules_divide(rules: Mapping[str, Role], model: nn.Module, tp: int) -> None:
    """Raise UsageError if tp does not divide a layer evenly. The message suggests another tp."""
    for name, role in rules.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding) and role == "vocabulary":
            count, unit = module.num_embeddings, "tokens"
        elif isinstance(module, nn.Linear) and role in ("column", "row", "head"):
            count = module.in_features if role == "row" else module.out_features
            unit = {"row": "inputs", "head": "tokens"}.get(role, "outputs")
            # An attention head cannot be split over ranks.
            head_dim = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
            if isinstance(head_dim, int) and count % head_dim == 0:
                count, unit = count // head_dim, "heads"
        else:
            continue
        check_divides(tp, count, f"{unit} of {name}")


def _uncovered(model: nn.Module, rules: Mapping[str, Role], inside: str = "") -> list[str]:
    """Return the parameters whose layer has no rule, in the model or in its module `inside`."""
    prefix = f"{inside}." if inside else ""
    owners = [(n, n.rpartition(".")[0]) for n, _ in model.named_parameters(prefix="")]
    return [name for name, owner in owners if name.startswith(prefix) and owner not in rules]


def _parents(rules: Mapping[str, Role], role: Role) -> set[str]:
    """Return the names of the modules that directly contain a layer with this role."""
    return {name.rpartition(".")[0] for name, its_role in rules.items() if its_role == role}
