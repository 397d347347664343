"""What `autokernel.load(run)(model)` does to a model: the same object, with a compiled call.

The model keeps its class, its parameters and its ``state_dict``; only its ``__call__`` goes through
``torch.compile`` with the artifact's kernels, as ``nn.Module.compile`` would do it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from autokernel.backends.packing import merge_in_place
from autokernel.errors import UsageError
from autokernel.integrate.artifact import Artifact, Engagement
from autokernel.integrate.dynamo_backend import compile_graph
from autokernel.integrate.guarded import refresh_all


class LoadedCall:
    """The compiled call of a loaded model.  Tells once which kernels engaged, and why others did not."""

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
        self._say = say
        self._told: tuple[int, int] | None = None

        def backend(gm: Any, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
            return compile_graph(gm, example_inputs, self.artifact, executor=executor)

        self._compiled = torch.compile(model._call_impl, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._compiled(*args, **kwargs)
        if self._say is not None:
            self._tell(self._say)
        return result

    def _tell(self, say: Callable[[str], None]) -> None:
        """What is new since the last call: kernels that engaged, or why the original code runs."""
        engagement = self.artifact.engagement
        now = (sum(engagement.sites.values()), len(engagement.reasons))
        if now == self._told or not engagement.graphs:
            return
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
    for tensor in (*model.parameters(), *model.buffers()):
        users[tensor.untyped_storage().data_ptr()].add(id(tensor))
    for entry in artifact.manifest["kernels"]:
        for merge in entry.get("merges", []):
            group: list[torch.Tensor] = [parameters[n] for n in merge["names"] if n in parameters]
            if len(group) < len(merge["names"]) or any(
                users[p.untyped_storage().data_ptr()] - {id(q) for q in group} for p in group
            ):
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
