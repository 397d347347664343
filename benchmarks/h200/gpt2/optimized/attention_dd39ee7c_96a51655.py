"""Attention through the library's fused kernel (causal).

Takes the place of h.0.attn, h.1.attn, h.2.attn.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKEND = "torch"


def kernel_fn(linear, attn_mask):
    split = linear.split(768, dim=2)
    q = split[0]
    view = q.view(1, 1024, 12, 64)
    q_1 = view.transpose(1, 2)
    k = split[1]
    view_1 = k.view(1, 1024, 12, 64)
    k_1 = view_1.transpose(1, 2)
    v = split[2]
    view_2 = v.view(1, 1024, 12, 64)
    v_1 = view_2.transpose(1, 2)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        matmul_1 = F.scaled_dot_product_attention(q_1, k_1, v_1, is_causal=True, scale=0.125)
    transpose_4 = matmul_1.transpose(1, 2)
    contiguous = transpose_4.contiguous()
    y = contiguous.view(1, 1024, 768)
    return y
