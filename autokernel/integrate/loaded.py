"""What `autokernel.load(run)(model)` does to a model: the same object, with a compiled call.

The model keeps its class, its parameters and its ``state_dict``; only its ``__call__`` goes through
``torch.compile`` with the artifact's kernels, as ``nn.Module.compile`` would do it.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.external_utils import wrap_inline
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from autokernel.backends.packing import merge_in_place
from autokernel.capture.nodes import is_plain
from autokernel.errors import UsageError
from autokernel.integrate.artifact import Artifact, Engagement
from autokernel.integrate.dynamo_backend import compile_graph
from autokernel.integrate.guarded import refresh_all


class LoadedCall:
    """The compiled call of a loaded model.  Tells once which kernels engaged, and why others did not.

    Dynamo keeps graphs for any size beside those for one, and prefers the newest: after one call of another
    shape, calls of the shape that kernels were made for would find a graph without them.  So there are two
    compiled calls: one of fixed sizes, for calls of the form at which kernels engaged, and one for others.
    """

    def __init__(
        self,
        model: nn.Module,
        artifact: Artifact,
        *,
        say: Callable[[str], None] | None = None,
        executor: str | None = None,
    ) -> None:
        # Every loaded model counts its own call sites.
        self.artifact = replace(artifact, engagement=Engagement())
        self._model, self._say, self._executor = model, say, executor
        self._told: tuple[int, int] | None = None
        self._trying = threading.RLock()
        self._hooks_made, self._hooks = RemovableHandle.next_id, _hooks(model)
        self._start()

    def _start(self) -> None:
        self._fits: dict[tuple[Form | None, bool, bool], bool] = {}
        self._fitting: set[Form] = set()
        self._compiled = self._compile()
        self._fixed = self._compile(dynamic=False)

    def _compile(self, dynamic: bool | None = None) -> Callable[..., Any]:
        def backend(gm: Any, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
            return compile_graph(gm, example_inputs, self.artifact, executor=self._executor)

        call = self._model._call_impl
        if trace_rules.check(self._model.forward):  # torch's own (a Sequential): Dynamo would skip the frame
            call = wrap_inline(call)
        return torch.compile(call, backend=backend, dynamic=dynamic, **_own_cache())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if RemovableHandle.next_id != self._hooks_made:
            self._look_for_hooks()
        form = form_of(args, kwargs)
        key = form, torch.is_grad_enabled(), self._model.training
        if form is not None and key not in self._fits and self._worth_trying(form):
            with self._trying:  # of two threads, one tries
                if key not in self._fits:
                    return self._said(self._try(key, form, args, kwargs))
        if self._fits.get(key):
            return self._said(self._fixed(*_unmarked(args), **_unmarked(kwargs)))
        return self._said(self._compiled(*args, **kwargs))

    def _try(self, key: Any, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = sum(self.engagement.sites.values())
        result = self._fixed(*_unmarked(args), **_unmarked(kwargs))
        self._fits[key] = sum(self.engagement.sites.values()) > before
        if self._fits[key]:
            self._fitting.add(form)
        return result

    def _said(self, result: Any) -> Any:
        if self._say is not None:
            self._tell(self._say)
        return result

    def _worth_trying(self, form: Form) -> bool:
        """Whether kernels may fit calls of a form that is new in this mode; every try is compiled."""
        return form in self._fitting if self._fitting else len({f for f, _, _ in self._fits}) < TRIES

    def _look_for_hooks(self) -> None:
        """Compile anew where a module has got a hook.

        Dynamo notices hooks that go, but has no guard on modules that had none, since that costs every call;
        each new hook raises this one counter of torch's.
        """
        self._hooks_made = RemovableHandle.next_id
        hooks = _hooks(self._model)
        if hooks - self._hooks:
            self._start()
        self._hooks = hooks

    def _tell(self, say: Callable[[str], None]) -> None:
        """What is new since the last call: kernels that engaged, or why the original code runs."""
        engagement = self.artifact.engagement
        now = (sum(engagement.sites.values()), len(engagement.reasons))
        if now == self._told:
            return
        if not engagement.graphs:
            if not self.artifact.kernels:
                return
            engagement.left("Dynamo captured nothing of the model (TORCH_LOGS=graph_breaks says why)")
            now = (0, 1)
        if self._told is not None and 0 < now[0] == self._told[0]:
            say(f"autokernel: the original code runs for this call: {engagement.reasons[-1]}")
        else:
            say(self.artifact.summary())
        self._told = now

    @property
    def engagement(self) -> Engagement:
        return self.artifact.engagement

    def refresh(self) -> None:
        """Prepack all weights again: needed only after writes through ``.data``, which leave no trace."""
        refresh_all()


Form = tuple[Any, ...]
TRIES = 4


def form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form | None:
    """Sizes and plain values of a call's arguments; None where there are objects of other kinds."""
    found: list[Any] = []
    waiting: list[Any] = [*reversed(kwargs.values()), *reversed(args)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.append(value.shape)
        elif value is None or type(value) in (int, float, bool, str):
            found.append(value)
        elif type(value) in (tuple, list):
            found.append(len(value))
            waiting += reversed(value)
        elif type(value) is dict:
            found += value
            waiting += reversed(value.values())
        else:
            return None
    return (*kwargs, *found)


def _unmarked(given: Any) -> Any:
    """Arguments without ``mark_dynamic``: what is marked is another tensor over the same memory then."""
    if not any(hasattr(v, _MARK) for v in (given.values() if isinstance(given, dict) else given)):
        return given
    return pytree.tree_map_only(Tensor, lambda t: t.view_as(t) if hasattr(t, _MARK) else t, given)


_MARK = "_dynamo_dynamic_indices"


def _hooks(model: nn.Module) -> set[tuple[int, int]]:
    """(module, hook) for the forward hooks that there are, those for all modules included."""
    everywhere = [(0, h) for hooks in _GLOBAL_HOOKS for h in hooks]
    return {
        (id(m), h)
        for m in model.modules()
        for hooks in (m._forward_hooks, m._forward_pre_hooks)
        for h in hooks
    }.union(everywhere)


_GLOBAL_HOOKS = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)


def _own_cache() -> dict[str, Any]:
    """Arguments of torch.compile with which a model doesn't use up another one's recompilations.

    Dynamo counts them per code object, which all models of a class share, and runs what is beyond the limit
    as it is.  Where torch.compile can't count apart (2.11), the limit is raised with every model.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        return {"isolate_recompiles": True}
    torch._dynamo.config.recompile_limit += 8
    return {}


def attach(model: nn.Module, artifact: Artifact, *, say: Callable[[str], None] | None = None) -> nn.Module:
    """Give ``model`` a compiled call with the kernels of ``artifact``; returns ``model``."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("a scripted model can't take kernels; load into the model it was scripted from")
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        raise UsageError("the model is already compiled; load into the original (model._orig_mod)")
    compiled = getattr(model, "_compiled_call_impl", None)
    if compiled is not None and not isinstance(compiled, LoadedCall):
        raise UsageError("the model is already compiled (model.compile()); load before that, or into a copy")
    if type(model).__call__ is not nn.Module.__call__ and not isinstance(model, fx.GraphModule):
        raise UsageError(
            f"{type(model).__name__} has a __call__ of its own, past which no kernel would run: "
            "move what it does to forward()"
        )
    if any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise UsageError("the model has lazy layers without weights yet: call it once, then load")
    merge_parameters(model, artifact)
    model._compiled_call_impl = LoadedCall(model, artifact, say=say)  # type: ignore[assignment]
    return model


def merge_parameters(model: nn.Module, artifact: Artifact) -> int:
    """Lay parameters that kernels use merged side by side in memory; returns how many groups were laid.

    Has to happen before the model is compiled.  What can't be merged (another structure, shared or
    parametrized weights, memory that other parameters or buffers use as well) is packed by copying instead.
    """
    done = 0
    parameters = dict(model.named_parameters(remove_duplicate=False))
    users: dict[int, set[int]] = defaultdict(set)
    for tensor in filter(is_plain, (*model.parameters(), *model.buffers())):
        users[tensor.untyped_storage().data_ptr()].add(id(tensor))
    for entry in artifact.manifest["kernels"]:
        for merge in entry.get("merges", []):
            group: list[torch.Tensor] = [parameters[n] for n in merge["names"] if n in parameters]
            if len(group) < len(merge["names"]) or not all(map(is_plain, group)):
                continue
            if any(users[p.untyped_storage().data_ptr()] - {id(q) for q in group} for p in group):
                continue
            done += merge_in_place(group, merge["spare_rows"])
    return done


def loaded_call(model: nn.Module) -> LoadedCall:
    """The `LoadedCall` of a model that `load` was applied to."""
    call = getattr(model, "_compiled_call_impl", None)
    if not isinstance(call, LoadedCall):
        raise UsageError("no artifact is loaded into this model")
    return call


def unload(model: nn.Module) -> nn.Module:
    """Undo `load`: the model runs its own code again."""
    loaded_call(model)
    model._compiled_call_impl = None
    return model
