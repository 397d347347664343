"""Say in a captured graph what it does without writing in place, wherever that is the same.

``relu(x, inplace=True)``, ``x += y`` and ``x.mul_(2)`` on a tensor that the graph itself has made become
``relu(x)``, ``x + y`` and ``x * 2``, and everything after reads the result; dropout that drops nothing goes
away.  Regions are never cut through a tensor that is written, so without this a network of in-place
activations would have none.  What somebody else may see (an input, a parameter, a view that was taken before)
stays as it is.  Then what does nothing goes: casts and layout changes (`cancel`), masks that let everything
through (`literals`), and rows that nobody reads (`unread_rows`).
"""

from __future__ import annotations

import contextlib
import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from autokernel.capture.cancel import cancel, moved
from autokernel.capture.literals import drop_true_masks
from autokernel.capture.nodes import arguments, fake_value, is_tensor, storages, target_name, writes
from autokernel.capture.unread_rows import drop_unread_rows

_DROPOUTS = frozenset({"dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d",
                       "dropout3d"})  # fmt: skip
_FUNCTIONAL: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_METHODS = frozenset({
    "abs", "add", "addcdiv", "addcmul", "ceil", "clamp", "clamp_max", "clamp_min", "cos", "div", "divide",
    "erf", "exp", "floor", "lerp", "log", "masked_fill", "mul", "multiply", "neg", "pow", "reciprocal",
    "relu", "round", "rsqrt", "sigmoid", "sin", "sqrt", "square", "sub", "subtract", "tanh", "trunc",
})  # fmt: skip
"""Methods that have a form with an underscore, and compute the same without it."""


Form = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""op, target, args and kwargs of a node."""


def simplify(gm: fx.GraphModule) -> int:
    """Edit ``gm`` in place; how many nodes were changed.  Its inputs and results stay as they were."""
    changed = sum(_drop_dropout(node) for node in list(gm.graph.nodes))
    writers = [n for n in gm.graph.nodes if writes(n)]
    if writers:
        order = {n: i for i, n in enumerate(gm.graph.nodes)}
        changed += sum(_out_of_place(node, gm.graph, order) for node in writers)
    changed += cancel(gm.graph)
    changed += drop_true_masks(gm.graph)
    if rows := drop_unread_rows(gm.graph):
        changed += rows + cancel(gm.graph)
    if changed:
        gm.graph.lint()
        gm.recompile()
    return changed


def _drop_dropout(node: fx.Node) -> bool:
    if node.op != "call_function" or target_name(node) not in _DROPOUTS:
        return False
    given = arguments(node, ("input", "p", "training", "inplace"))
    source = given.get("input")
    # Without training it returns its very input; torch.dropout has no default for that, functional's is True.
    if not isinstance(source, fx.Node) or given.get("training", given.get("train", True)) is not False:
        return False
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)
    return True


def _out_of_place(node: fx.Node, graph: fx.Graph, order: dict[fx.Node, int]) -> bool:
    """Make ``node`` return a tensor of its own instead of writing one; False if that could be noticed."""
    target, *more = writes(node)
    form = _functional_form(node)
    if more or form is None or not is_tensor(target) or not is_tensor(node):
        return False
    now, old = order[node], fake_value(target)
    aliases = [n for n in graph.nodes if n is not node and storages(n) & storages(target)]
    for alias in aliases:
        if alias.op in ("placeholder", "get_attr"):
            return False
        # Whoever took a view of the tensor before this must be done with it.
        if order[alias] < now and alias is not target and any(order[u] > now for u in alias.users):
            return False
    fresh = _result(form, old)
    if fresh is None:
        return False
    node.op, node.target, node.args, node.kwargs = form
    node.meta["example_value"] = fresh
    target.replace_all_uses_with(node, delete_user_cb=lambda user: order[user] > now)
    for alias in aliases:
        if order[alias] > now:  # views of the new tensor share its storage, as they shared the old one's
            alias.meta["example_value"] = tree_map(partial(moved, old=old, fresh=fresh), fake_value(alias))
    return True


def _result(form: Form, old: Tensor) -> Tensor | None:
    """A fake result of the functional form; None unless it is laid out as what would be written."""
    op, target, args, kwargs = form
    values = tree_map(lambda x: fake_value(x) if isinstance(x, fx.Node) else x, (args, kwargs))
    mode = getattr(old, "fake_mode", None) or contextlib.nullcontext()
    try:
        with mode, torch.no_grad():
            function = target if op == "call_function" else getattr(values[0][0], target)
            made = function(*(values[0] if op == "call_function" else values[0][1:]), **values[1])
    except (RuntimeError, TypeError, ValueError, AttributeError):  # it has no such form: leave it as it was
        return None
    same = isinstance(made, Tensor) and (made.shape, made.dtype, made.device, made.stride()) == (
        old.shape, old.dtype, old.device, old.stride(),
    )  # fmt: skip
    return made if same else None


def _functional_form(node: fx.Node) -> Form | None:
    """The same without the write."""
    if node.op == "call_method":
        name = str(node.target).removesuffix("_")
        return (node.op, name, node.args, dict(node.kwargs)) if name in _METHODS else None
    if node.target in _FUNCTIONAL:
        return node.op, _FUNCTIONAL[node.target], node.args, dict(node.kwargs)
    name = target_name(node)
    if name == "batch_norm":
        return None
    if "out" in node.kwargs or name == "setitem" or name in _DROPOUTS:
        return None
    if node.kwargs.get("inplace") is True:
        return node.op, node.target, node.args, {**node.kwargs, "inplace": False}
    if name.endswith("_"):
        plain = getattr(torch, name.removesuffix("_"), None)
        known = callable(plain) and name.removesuffix("_") in _METHODS
        return (node.op, plain, node.args, dict(node.kwargs)) if known else None
    if any(a is True for a in node.args):  # by position, as `writes` has seen
        args = list(node.args)
        args[len(args) - 1 - args[::-1].index(True)] = False
        return node.op, node.target, tuple(args), dict(node.kwargs)
    return None
