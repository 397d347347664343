"""Language-model providers: name on the command line -> module.

Each module has ``create(model, base_url) -> Provider``.  The registry is literal: adding a provider is one
file and one line here.
"""

from __future__ import annotations

from types import ModuleType

from autokernel.proposers.providers import openai_compatible, replay

PROVIDERS: dict[str, ModuleType] = {
    "openai": openai_compatible,
    "replay": replay,
}
