"""Rotary embedding in real arithmetic.

Takes the place of layers.0.attention, layers.1.attention, layers.2.attention.
"""

import torch
import torch.nn.functional as F

BACKEND = "torch"
COMPILE = True


def prepack(freqs_cis):
    freqs_cis_1 = freqs_cis[:512]
    freqs_cis_2 = freqs_cis_1.view(1, 512, 1, 32)
    return freqs_cis_2.real.contiguous(), freqs_cis_2.imag.contiguous()


def kernel_fn(linear, linear_1, cos, sin):
    q = linear.view(1, 512, 12, 64)
    k = linear_1.view(1, 512, 4, 64)
    float_2 = q.float()
    reshape = float_2.reshape(1, 512, 12, -1, 2)
    q_1_re, q_1_im = reshape.unbind(-1)
    float_3 = k.float()
    reshape_1 = float_3.reshape(1, 512, 4, -1, 2)
    k_1_re, k_1_im = reshape_1.unbind(-1)
    mul_2_re = q_1_re * cos - q_1_im * sin
    mul_2_im = q_1_re * sin + q_1_im * cos
    view_as_real = torch.stack((mul_2_re, mul_2_im), dim=-1)
    q_out = view_as_real.flatten(3)
    mul_3_re = k_1_re * cos - k_1_im * sin
    mul_3_im = k_1_re * sin + k_1_im * cos
    view_as_real_1 = torch.stack((mul_3_re, mul_3_im), dim=-1)
    k_out = view_as_real_1.flatten(3)
    q_1_1 = q_out.type_as(q)
    k_1_1 = k_out.type_as(k)
    return q_1_1, k_1_1
