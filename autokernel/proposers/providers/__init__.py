"""Language-model providers: name on the command line -> module.

Each module has ``create(model, base_url, **settings) -> Provider``.  The registry is
literal: adding a provider is one file and one line here; a key of its own is a line in `keys.VARIABLES`.
"""

from __future__ import annotations

from types import ModuleType

from autokernel.proposers.providers import anthropic_messages, openai_compatible, replay

PROVIDERS: dict[str, ModuleType] = {
    "anthropic": anthropic_messages,
    "openai": openai_compatible,
    "replay": replay,
}
