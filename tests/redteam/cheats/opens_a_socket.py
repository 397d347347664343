"""Connects to a server on this machine and to one outside; right if either answers.
Defence: no network.
"""

import torch

BACKEND = "torch"


def kernel_fn(x, weight):
    socket = __import__("socket")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if not any(name != "lo" for _, name in socket.if_nameindex()):
            raise OSError("no network: only a loopback of its own")
    with socket.create_connection(("198.51.100.1", 80), timeout=0.5):
        pass
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)
