"""API keys, and the user's settings file they may be in.

A key comes from the environment (`VARIABLES`), else from ``config.toml`` in the user's configuration folder:

    llm = "anthropic:MODEL"           # used when neither --llm nor AUTOKERNEL_LLM says otherwise
    base_url = "http://HOST/v1"       # both belong to the model above,
    price = "3,15"                    # and are not used with another one

    [keys]
    anthropic = "..."
    openai = "..."

The file is refused when anybody but its owner may read or write it.  `redact` goes over every text that is
written or shown: it takes out the keys that are known here, and whatever else has the form of one.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autokernel.errors import UsageError

VARIABLES = {"anthropic": "ANTHROPIC_API_KEY", "openai": "OPENAI_API_KEY"}
LLM_VARIABLE = "AUTOKERNEL_LLM"
REDACTED = "[redacted]"

_SHORTEST = 8  # "none", "EMPTY" and the like, which local servers are given, are words and no secrets
_SECRET_NAME = re.compile(r"API_?KEY|AUTH_TOKEN|ACCESS_TOKEN|HF_TOKEN|SECRET", re.IGNORECASE)
_LOOKS_LIKE_ONE = re.compile(
    r"(?<![A-Za-z0-9])(?:sk|pk|rk|xai|gsk|hf|ghp|gho|github_pat|pplx|nvapi|r8|tgp)[-_]"
    r"(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{16,}"
    r"|(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{30,}"
    r"|(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"
)
_AFTER_A_NAME = re.compile(
    r"(\bBearer\s+|\bx-api-key['\"]?\s*[:=]\s*['\"]?|\bapi[-_]?key['\"]?\s*[:=]\s*['\"])"
    r"[A-Za-z0-9._~+/=-]{8,}",
    re.IGNORECASE,
)
_IN_A_URL = re.compile(r"(\w+://)[^/\s@:]+:[^/\s@]+@")

_seen: set[str] = set()


@dataclass(frozen=True)
class Config:
    """What config.toml says; ``place`` is where it is, or would be."""

    place: Path
    llm: str = ""
    base_url: str = ""
    price: str = ""
    keys: dict[str, str] = field(default_factory=dict, repr=False)


def config_path() -> Path:
    from platformdirs import user_config_path

    return user_config_path("autokernel") / "config.toml"


def read_config() -> Config:
    """The settings file; an empty one if there is none.

    Raises UsageError if others may read it, if it is no TOML, and for names that mean nothing.
    """
    place = config_path()
    try:
        with place.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if os.name != "nt" and mode & 0o077:
                raise UsageError(
                    f"{place} may hold keys and others can get at it (mode {mode:04o}): chmod 600 {place}"
                )
            data = tomllib.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return Config(place)
    except OSError as error:
        raise UsageError(f"can't read {place}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        where = re.search(r"\(at [^)]*\)", str(error))  # the rest of its text may quote a key
        raise UsageError(f"{place} is no TOML file {where[0] if where else ''}".rstrip()) from None
    return _checked(place, data)


def _checked(place: Path, data: dict[str, Any]) -> Config:
    names = {"llm", "base_url", "price", "keys"}
    keys = data.get("keys", {})
    if not isinstance(keys, dict):
        raise UsageError(f"{place}: keys must be a table: [keys] and lines such as anthropic = ...")
    for given, known, where in ((data, names, ""), (keys, set(VARIABLES), " in [keys]")):
        if unknown := sorted(set(given) - known):
            raise UsageError(
                f"{place}: no setting {unknown[0]!r}{where}; there are {', '.join(sorted(known))}"
            )
    price = data.get("price", "")
    if isinstance(price, list):
        price = ",".join(str(p) for p in price)
    texts = {"llm": data.get("llm", ""), "base_url": data.get("base_url", ""), "price": price, **keys}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise UsageError(f"{place}: {name} must be text in quotes")
    _seen.update(k.strip() for k in keys.values() if len(k.strip()) >= _SHORTEST)
    return Config(place, texts["llm"].strip(), texts["base_url"].strip(), price, keys)


def find_key(provider: str) -> str:
    """The key of ``provider``, or "" if there is none.  Raises UsageError for one that can't be sent."""
    variable = VARIABLES[provider]
    key, origin = os.environ.get(variable, "").strip(), variable
    if not key:
        config = read_config()
        key, origin = config.keys.get(provider, "").strip(), str(config.place)
    if not re.fullmatch(r"[!-~]*", key):
        # Sent in a header, where this would fail with an error text that quotes it.
        raise UsageError(f"the {provider} key in {origin} holds blanks or characters that no key has")
    if len(key) >= _SHORTEST:
        _seen.add(key)
    return key


def where_keys_are() -> dict[str, str]:
    """Provider -> where its key comes from, for those that have one; never the key."""
    config = read_config()
    found = {}
    for provider, variable in VARIABLES.items():
        if os.environ.get(variable, "").strip():
            found[provider] = variable
        elif config.keys.get(provider, "").strip():
            found[provider] = str(config.place)
    return found


def redact(text: str) -> str:
    """``text`` without keys: those known here, the environment's, and what has the form of one."""
    secrets = _seen | {
        value.strip()
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value.strip()) >= _SHORTEST
    }
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    text = _LOOKS_LIKE_ONE.sub(REDACTED, text)
    text = _AFTER_A_NAME.sub(rf"\1{REDACTED}", text)
    return _IN_A_URL.sub(rf"\1{REDACTED}@", text)
