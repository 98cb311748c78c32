"""Sharding rules: how tensor parallelism splits each layer of a model.

The rules are a dict from module names to roles. `*` matches one part of a name:

    {"embed": "vocabulary", "blocks.*.attention.wq": "column", "blocks.*.attention.wo": "row"}

Two consecutive matrices are split so that no communication is needed between them. A is split by
columns, A = [A₁ A₂], and B is split by rows, B = [B₁; B₂]. Each rank computes one term of the
result:

    rank 0:   X · A₁ → ReLU → · B₁ ┐
                                   ├ + → result
    rank 1:   X · A₂ → ReLU → · B₂ ┘

Layers without a rule are not split. Every tp rank computes them on whole activations.

Some layers compute several matrices at once, such as q, k and v (GPT-2's c_attn, Phi-3's qkv_proj).
If the output of such a layer were split evenly, a rank would not get whole heads of q, k and v.
Such a layer has the role "column_gather": the matrix product is split, and every rank gets the
whole output. The next layer has the role "row_split".

Models of Hugging Face's transformers library have their own rules in the attribute `tp_plan`. These
rules are translated to the roles of this file.
"""

import re
from collections.abc import Collection, Mapping
from typing import Literal, get_args

from torch import nn

from tutti.models.lora_layers import base_layer_of, is_linear, linear_sizes
from tutti.parallel.layout import check_divides
from tutti.world.errors import UsageError, did_you_mean

Role = Literal[
    "vocabulary",
    "norm",
    "whole",
    "input",
    "column",
    "row",
    "head",
    "column_gather",
    "row_split",
    "per_head",
    "head_bias",
]
"""The roles:

vocabulary      an embedding that is split along the vocabulary
norm            a norm that is applied to a part of the sequence
whole           any other layer between split layers; every rank computes the whole layer
input           a module that needs the whole sequence, such as attention; its input is gathered
                once for all of its column layers
column          a linear layer that is split by outputs
row             a linear layer that is split by inputs
head            a linear layer whose outputs are the vocabulary; it is split by outputs
column_gather   like column, but every rank gets the whole output
row_split       like row, but the input is whole
per_head        a layer that is applied to each attention head, such as a norm of queries; its
                weights are not split
head_bias       an embedding with one value per attention head, such as T5's relative positions; it
                is split by heads
"""
ShardingRules = Mapping[str, Role]

# Layer names of common transformers, compared with the last one or two parts of a module name.
_USUAL_NAMES: dict[Role, str] = {
    "column": "wq wk wv q_proj k_proj v_proj query key value q k v "
    "gate up gate_proj up_proj w1 w3 fc1 linear1 c_fc wi wi_0 wi_1 intermediate.dense",
    "row": "wo o_proj out_proj o proj down down_proj w2 fc2 linear2 c_proj output.dense",
    "column_gather": "c_attn qkv qkv_proj gate_up_proj",
    "head_bias": "relative_attention_bias",
    "vocabulary": "embed embed_tokens tok_embeddings wte",
    "head": "head lm_head output",
}
# The name endings of the modules inside a layer with a LoRA adapter.
_ADAPTED = re.compile(r"\.(base_layer|lora_[AB]\.\w+)$")
_LINEAR: tuple[Role, ...] = ("column", "row", "head", "column_gather", "row_split")
# The styles of a transformers `tp_plan`, and the roles of this file. Styles for experts are left
# out, so every tp rank computes all experts.
_HUGGING_FACE_ROLES: dict[str, Role] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gather",
    "packed_colwise": "column_gather",
    "rowwise_split_input": "row_split",
    "packed_rowwise": "row_split",
    "replicated_with_grad_allreduce": "per_head",
}


def _fits(role: Role, module: nn.Module) -> bool:
    module = base_layer_of(module)  # an adapted layer has the same rule as its base layer
    if role in _LINEAR:
        return is_linear(module)
    if role in ("vocabulary", "head_bias"):
        return isinstance(module, nn.Embedding)
    return role != "norm" or isinstance(module, nn.LayerNorm | nn.RMSNorm)


def default_rules(model: nn.Module, tp: int = 1) -> dict[str, Role]:
    """Return rules from the model's own `tp_plan`, or from common layer names.

    Raise UsageError if the model has neither a `tp_plan` nor layers with common names. If tp does
    not divide the vocabulary of a Hugging Face model, its embedding and head are not split.
    """
    rules = _rules_of_tp_plan(model) or _rules_by_name(model)
    from_transformers = hasattr(model, "base_model_prefix")
    if from_transformers:
        _set_vocabulary_rules(model, rules, tp)
    with_columns = _parents(rules, "column")
    gathered = _parents(rules, "column_gather")
    for name in [name for name, role in rules.items() if role in ("row", "per_head")]:
        parent = name.rpartition(".")[0]
        if rules[name] == "row" and parent in gathered:
            rules[name] = "row_split"
        # The input of a row layer is split only if a column layer precedes the row layer. The
        # column layer is in the same module, or elsewhere in the parent module (BERT has
        # attention.self.query and attention.output.dense). Otherwise the row layer is not split.
        elif parent not in with_columns and not (
            rules[name] == "row" and _near(with_columns, parent)
        ):
            del rules[name]
    # A column layer without a following row layer is not split, because the next layer needs whole
    # activations. An example is an attention whose output layer has an uncommon name.
    with_rows = _parents(rules, "row") | _parents(rules, "row_split")
    only_rows = with_rows - with_columns - gathered
    for name in [n for n, role in rules.items() if role in ("column", "per_head", "head_bias")]:
        parent = name.rpartition(".")[0]
        if parent not in with_rows and not _near(only_rows, parent):
            del rules[name]
    with_columns = _parents(rules, "column")
    if not {"row", "row_split"} & set(rules.values()) or not with_columns | gathered:
        attention = [n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
        reason = (
            f"{attention[0]} is an nn.MultiheadAttention, which tp does not split, and no other "
            f"layer of {type(model).__name__} has a common transformer layer name"
            if attention
            else f"no layer of {type(model).__name__} has a common transformer layer name, so tp "
            "needs rules"
        )
        raise UsageError(
            f"{reason}: give rules in the model's attribute sharding_rules, such as "
            '{"layers.*.up": "column", "layers.*.down": "row"}, or use shard or dp instead of tp'
        )
    if from_transformers:
        for parent in with_columns & _parents(rules, "row"):
            # A norm in the same module as split layers (as in OPT) normalises whole activations.
            for name in _uncovered(model, rules, parent):
                layer = name.rpartition(".")[0]
                if _fits("norm", model.get_submodule(layer)):
                    rules[layer] = "whole"
        # Hugging Face models derive positions from the length of the embedded sequence, so their
        # activations are never split along the sequence.
        inputs = with_columns - {""} - _parents(rules, "whole")
        inputs = {parent for parent in inputs if not _uncovered(model, rules, parent)}
        return rules | dict.fromkeys(inputs, "input")
    if {"vocabulary", "head"} <= set(rules.values()):
        # Between the embedding and the head, activations can be split along the sequence. A module
        # that has only column and row layers gathers its input once for all of its column layers.
        # In a module that also has norms, each column layer gathers its own input.
        inputs = {parent for parent in with_columns if not _uncovered(model, rules, parent)} - {""}
        rules |= dict.fromkeys(inputs, "input")
        inside = tuple(f"{parent}." for parent in inputs)
        for name, module in model.named_modules():
            if _fits("norm", module) and not name.startswith(inside):
                rules[name] = "norm"
    return rules


def _rules_by_name(model: nn.Module) -> dict[str, Role]:
    roles = {name: role for role, names in _USUAL_NAMES.items() for name in names.split()}
    rules: dict[str, Role] = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        role = roles.get(".".join(parts[-2:])) or roles.get(parts[-1])
        if role is None or not _fits(role, module):
            continue
        # MultiheadAttention reads the weights of its layers without calling the layers.
        if not isinstance(model.get_submodule(".".join(parts[:-1])), nn.MultiheadAttention):
            rules[name] = role
    return rules


def _rules_of_tp_plan(model: nn.Module) -> dict[str, Role]:
    """Translate the `tp_plan` of a Hugging Face model: module name patterns → styles."""
    rules: dict[str, Role] = {}
    plan = getattr(model, "tp_plan", None) or {}
    for pattern, style in plan.items():
        expression = _pattern(pattern)
        role = _HUGGING_FACE_ROLES.get(style)
        for name, module in model.named_modules() if role else ():
            assert role is not None
            if expression.fullmatch(name) and _fits(role, module):
                rules[name] = role
    return rules


def _set_vocabulary_rules(model: nn.Module, rules: dict[str, Role], tp: int) -> None:
    """Set rules that split the embeddings and head of a Hugging Face model, if possible.

    The embeddings are the input embedding and all embeddings that share its weight, such as the
    embeddings of T5's encoder and decoder. If embeddings and head share one weight, either all or
    none of them are split.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    names = {id(module): name for name, module in model.named_modules()}
    own = [names.get(id(module), "") for module in (embedding, head)]
    for name in [n for n, role in rules.items() if role in ("vocabulary", "head") or n in own]:
        del rules[name]
    name_of_head, head = names.get(id(head), ""), head and base_layer_of(head)
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        return
    shared = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.weight is embedding.weight
    ]
    # An embedding with padding_idx is not split, because it would compare padding_idx with the
    # indices of its local part.
    splits = all(m.padding_idx is None and m.num_embeddings % tp == 0 for _, m in shared)
    if splits and (head.weight is not embedding.weight or head.out_features % tp == 0):
        rules |= {name: "vocabulary" for name, _ in shared}
    if head.out_features % tp == 0 and (head.weight is not embedding.weight or splits):
        rules[name_of_head] = "head"


def _near(modules: Collection[str], parent: str) -> bool:
    """Return whether one of the modules is inside the module that contains `parent`."""
    above = parent.rpartition(".")[0]
    return bool(above) and any(name.startswith(f"{above}.") for name in modules)


def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def resolve_rules(rules: ShardingRules, model: nn.Module) -> dict[str, Role]:
    """Return the rules with patterns expanded to module names. Raise UsageError for unknown
    names."""
    names = [name for name, _ in model.named_modules() if name]
    resolved: dict[str, Role] = {}
    for pattern, role in rules.items():
        if role not in get_args(Role):
            raise UsageError(
                f"the sharding rules give {pattern!r} the unknown role {role!r}: "
                f"{did_you_mean(role, get_args(Role))}"
            )
        expression = _pattern(pattern)
        matches = [name for name in names if expression.fullmatch(name)]
        if not matches:
            patterns = dict.fromkeys(
                re.sub(r"\b\d+\b", "*", n) if "*" in pattern else n for n in names
            )
            raise UsageError(
                f"{type(model).__name__} has no module {pattern!r}, but the sharding rules name "
                f"it: {did_you_mean(pattern, patterns)}"
            )
        for name in matches:
            module = model.get_submodule(name)
            if not _fits(role, module):
                needed = dict.fromkeys(("vocabulary", "head_bias"), "an Embedding")
                needed |= {"norm": "a LayerNorm or RMSNorm"}
                raise UsageError(
                    f"sharding rules: {name} is a {type(module).__name__}, but role {role!r} needs "
                    f"{needed.get(role, 'a Linear')}"
                )
            resolved[name] = role
    return resolved


def splits_sequence(rules: Mapping[str, Role], model: nn.Module) -> bool:
    """Return whether the rules allow activations to be split along the sequence.

    This requires rules for the embedding, the head and every layer between them.
    """
    return {"vocabulary", "norm", "head"} <= set(rules.values()) and not _uncovered(model, rules)


def check_between(rules: Mapping[str, Role], model: nn.Module) -> None:
    """Raise UsageError if a layer without a rule may lie between split layers.

    Such a layer would get only this rank's heads or channels, so its gradient would be incomplete.
    """
    for parent in sorted(_parents(rules, "column") & _parents(rules, "row") - {""}):
        for name in _uncovered(model, rules, parent):
            if _takes_whole_width(model, rules, parent, name):
                continue
            raise UsageError(
                f"sharding rules: {name} has no role, but is inside {parent}, whose layers are "
                'split over tp. If its layer gets whole activations, use the role "norm" or '
                f'"whole". If its layer works on heads, leave {parent} out of the rules or use '
                "shard instead of tp"
            )


def _takes_whole_width(
    model: nn.Module, rules: Mapping[str, Role], parent: str, parameter: str
) -> bool:
    """Return whether a layer next to split layers accepts only whole activations.

    This is true for torch's attention, and for a norm that is as wide as the output of the row
    layers. Such a layer would raise an error if it got only the channels of one rank.
    """
    layer = model.get_submodule(parameter.rpartition(".")[0])
    above = model.get_submodule(parameter.rpartition(".")[0].rpartition(".")[0])
    if isinstance(layer, nn.MultiheadAttention) or isinstance(above, nn.MultiheadAttention):
        return True
    rows = [n for n, role in rules.items() if role == "row" and n.rpartition(".")[0] == parent]
    widths = {getattr(model.get_submodule(name), "out_features", None) for name in rows}
    return _fits("norm", layer) and {len(model.get_parameter(parameter))} == widths


def check_rules_divide(rules: Mapping[str, Role], model: nn.Module, tp: int) -> None:
    """Raise UsageError if tp does not divide a layer evenly. The message suggests a valid tp."""
    for name, role in rules.items():
        module = base_layer_of(model.get_submodule(name))
        if isinstance(module, nn.Embedding) and role == "vocabulary":
            count, unit = module.num_embeddings, "tokens"
        elif isinstance(module, nn.Embedding) and role == "head_bias":
            count, unit = module.embedding_dim, "heads"
        elif is_linear(module) and role in _LINEAR:
            outputs, inputs = linear_sizes(module)
            count = inputs if role in ("row", "row_split") else outputs
            unit = {"row": "inputs", "row_split": "inputs", "head": "tokens"}.get(role, "outputs")
            # An attention head cannot be split over ranks.
            attention = model.get_submodule(name.rpartition(".")[0])
            head_dim = head_size(attention)
            if role in ("column", "row") and head_dim and count % head_dim == 0:
                count, unit = count // head_dim, "heads"
        else:
            continue
        check_divides(tp, count, f"{unit} of {name}")


def head_size(attention: nn.Module) -> int:
    """Return the size of an attention head, or 0 if it is unknown. Models use several names."""
    for name in ("head_dim", "attention_head_size", "key_value_proj_dim"):
        size = getattr(attention, name, None)
        if isinstance(size, int) and size > 0:
            return size
    return 0


def _uncovered(model: nn.Module, rules: Mapping[str, Role], inside: str = "") -> list[str]:
    """Return the parameters whose layer has no rule, in the whole model or in module `inside`."""
    prefix = f"{inside}." if inside else ""
    owners = [(n, n.rpartition(".")[0]) for n, _ in model.named_parameters(prefix="")]
    return [
        name
        for name, owner in owners
        if name.startswith(prefix) and owner not in rules and _ADAPTED.sub("", owner) not in rules
    ]


def _parents(rules: Mapping[str, Role], role: Role) -> set[str]:
    """Return the names of the modules that directly contain a layer with this role."""
    return {name.rpartition(".")[0] for name, its_role in rules.items() if its_role == role}
