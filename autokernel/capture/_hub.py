"""Whether the Hugging Face Hub can be asked, within seconds: its own client tries again for half a minute."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit
from urllib.request import getproxies

WAIT_S = 4.0
UNREACHABLE = " (no network, or HF_HUB_OFFLINE is set)"


def reachable() -> bool:
    """Whether the Hub's server takes a connection; True behind a proxy, which alone could tell."""
    from huggingface_hub import constants  # pyright: ignore[reportMissingImports]

    if constants.HF_HUB_OFFLINE:
        return False
    server = urlsplit(constants.ENDPOINT)
    if server.hostname is None or {server.scheme, "all"} & set(getproxies()):
        return True
    address = (server.hostname, server.port or (80 if server.scheme == "http" else 443))
    found: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection(address, timeout=WAIT_S).close()
            found.append(True)

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name has no limit of its own
    asking.start()
    asking.join(WAIT_S)
    return bool(found)


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Inside, the Hub's client looks into its cache only, unless the Hub can be asked."""
    from huggingface_hub import constants  # pyright: ignore[reportMissingImports]

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = not reachable()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
