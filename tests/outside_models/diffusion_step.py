"""One ancestral DDPM sampling step with a tiny eps-prediction U-Net.

Cosine schedule kept in buffers, sinusoidal time embedding with scale-shift conditioning, GroupNorm + SiLU
residual blocks, self-attention at the lowest resolution. forward(x_t, t, noise) returns x_{t-1}.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def timestep_embedding(t: Tensor, dim: int, max_period: float = 10000.0) -> Tensor:
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    emb = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
    if dim % 2:
        emb = F.pad(emb, (0, 1))
    return emb


def cosine_betas(steps: int, s: float = 0.008) -> Tensor:
    x = torch.linspace(0, steps, steps + 1, dtype=torch.float64)
    f = torch.cos((x / steps + s) / (1 + s) * math.pi / 2) ** 2
    return (1 - f[1:] / f[:-1]).clamp(1e-5, 0.999)


def extract(a: Tensor, t: Tensor, ndim: int) -> Tensor:
    """Pick a[t] per sample, shaped to broadcast against an ndim tensor."""
    return a.gather(0, t).view(-1, *([1] * (ndim - 1)))


def zero_ish(module: nn.Module, scale: float = 0.1) -> nn.Module:
    # small init rather than zero so that an untrained net is not just the identity
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(scale)
    return module


class ResBlock(nn.Module):
    def __init__(self, cin: int, cout: int, emb_dim: int, groups: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, cin)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.emb_proj = nn.Sequential(nn.SiLU(), nn.Linear(emb_dim, 2 * cout))
        self.norm2 = nn.GroupNorm(groups, cout)
        self.drop = nn.Dropout(dropout)
        self.conv2 = zero_ish(nn.Conv2d(cout, cout, 3, padding=1))
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.emb_proj(emb)[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        h = self.conv2(self.drop(F.silu(h, inplace=True)))
        return self.skip(x) + h


class AttnBlock(nn.Module):
    def __init__(self, channels: int, num_heads: int = 4, groups: int = 8) -> None:
        super().__init__()
        assert channels % num_heads == 0
        self.num_heads = num_heads
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj = zero_ish(nn.Conv1d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        qkv = self.qkv(self.norm(x)).reshape(b * self.num_heads, 3 * c // self.num_heads, -1)
        q, k, v = qkv.split(c // self.num_heads, dim=1)
        scale = 1 / math.sqrt(math.sqrt(c // self.num_heads))
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        h = torch.einsum("bts,bcs->bct", weight, v).reshape(b, c, -1)
        return (x + self.proj(h)).reshape(b, c, *spatial)


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class EpsNet(nn.Module):
    def __init__(self, channels: int = 3, base: int = 32, mults: tuple[int, ...] = (1, 2, 2)) -> None:
        super().__init__()
        self.base = base
        emb_dim = 4 * base
        self.time_mlp = nn.Sequential(nn.Linear(base, emb_dim), nn.SiLU(), nn.Linear(emb_dim, emb_dim))
        self.conv_in = nn.Conv2d(channels, base, 3, padding=1)

        self.downs = nn.ModuleList()
        ch, skip_chs = base, []
        for i, m in enumerate(mults):
            last = i == len(mults) - 1
            self.downs.append(
                nn.ModuleDict(
                    {
                        "res": ResBlock(ch, base * m, emb_dim),
                        "attn": AttnBlock(base * m) if last else nn.Identity(),
                        "down": nn.Identity() if last else Downsample(base * m),
                    }
                )
            )
            ch = base * m
            skip_chs.append(ch)

        self.mid1 = ResBlock(ch, ch, emb_dim)
        self.mid_attn = AttnBlock(ch)
        self.mid2 = ResBlock(ch, ch, emb_dim)

        self.ups = nn.ModuleList()
        for i, m in reversed(list(enumerate(mults))):
            self.ups.append(
                nn.ModuleDict(
                    {
                        "res": ResBlock(ch + skip_chs.pop(), base * m, emb_dim),
                        "up": Upsample(base * m) if i > 0 else nn.Identity(),
                    }
                )
            )
            ch = base * m
        self.out = nn.Sequential(nn.GroupNorm(8, ch), nn.SiLU(), nn.Conv2d(ch, channels, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        emb = self.time_mlp(timestep_embedding(t, self.base))
        h = self.conv_in(x)
        hs = []
        for level in self.downs:
            h = level["attn"](level["res"](h, emb))
            hs.append(h)
            h = level["down"](h)
        h = self.mid2(self.mid_attn(self.mid1(h, emb)), emb)
        for level in self.ups:
            h = level["res"](torch.cat([h, hs.pop()], dim=1), emb)
            h = level["up"](h)
        return self.out(h)


class DDPMStep(nn.Module):
    def __init__(self, net: nn.Module, num_steps: int = 1000, clip_x0: bool = True) -> None:
        super().__init__()
        self.net = net
        self.num_steps = num_steps
        self.clip_x0 = clip_x0

        betas = cosine_betas(num_steps)
        alphas = 1.0 - betas
        acp = torch.cumprod(alphas, dim=0)
        acp_prev = F.pad(acp[:-1], (1, 0), value=1.0)
        post_var = betas * (1 - acp_prev) / (1 - acp)

        def reg(name: str, val: Tensor) -> None:
            self.register_buffer(name, val.float())

        reg("sqrt_recip_acp", (1 / acp).sqrt())
        reg("sqrt_recipm1_acp", (1 / acp - 1).sqrt())
        reg("post_coef_x0", betas * acp_prev.sqrt() / (1 - acp))
        reg("post_coef_xt", (1 - acp_prev) * alphas.sqrt() / (1 - acp))
        reg("post_log_var", post_var.clamp(min=1e-20).log())

    def predict_x0(self, x_t: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        a = extract(self.sqrt_recip_acp, t, x_t.ndim)
        b = extract(self.sqrt_recipm1_acp, t, x_t.ndim)
        return a * x_t - b * eps

    def forward(self, x_t: Tensor, t: Tensor, noise: Tensor | None = None) -> Tensor:
        assert t.shape == (x_t.shape[0],), "t must hold one step index per sample"
        eps = self.net(x_t, t)
        x0 = self.predict_x0(x_t, t, eps)
        if self.clip_x0:
            x0.clamp_(-1.0, 1.0)
        mean = extract(self.post_coef_x0, t, x_t.ndim) * x0 + extract(self.post_coef_xt, t, x_t.ndim) * x_t
        if noise is None:
            noise = torch.randn_like(x_t)
        # no noise at the very last step
        nonzero = (t != 0).float().view(-1, *([1] * (x_t.ndim - 1)))
        return mean + nonzero * torch.exp(0.5 * extract(self.post_log_var, t, x_t.ndim)) * noise


def build() -> nn.Module:
    torch.manual_seed(0)
    return DDPMStep(EpsNet())


def example_inputs(model: nn.Module) -> tuple:
    gen = torch.Generator().manual_seed(1)
    x_t = torch.randn(3, 3, 32, 32, generator=gen)
    t = torch.tensor([0, 250, 700])
    noise = torch.randn(x_t.shape, generator=gen)
    return x_t, t, noise
