"""The gate of a gated MLP: ``activation(gate) * up``, elementwise.

kernel_fn(gate, up)  = F.silu(gate) * up                       with ACTIVATION = "silu"
                     = F.gelu(gate) * up                       with ACTIVATION = "gelu"
                     = F.gelu(gate, approximate="tanh") * up   with ACTIVATION = "gelu_tanh"
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "any"

ACTIVATION = "silu"
BLOCK = 1024
num_warps = 4
SPACE = {"BLOCK": [256, 512, 1024, 2048, 4096], "num_warps": [2, 4, 8]}


@triton.jit
def gated_kernel(gate_ptr, up_ptr, out_ptr, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # 0.5 (1 + tanh u) is the logistic function of 2u
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-2.0 * u))
    tl.store(out_ptr + at, active * up, mask=inside)


def kernel_fn(gate, up):
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    count = gate.numel()
    gated_kernel[(triton.cdiv(count, BLOCK),)](
        gate, up, out, count, ACTIVATION, BLOCK=BLOCK, num_warps=num_warps
    )
    return out
