"""Do the comparator's limits tell honest kernels from dishonest ones?  Every region family, every dtype.

    python benchmarks/judge_limits.py [--device cpu|cuda] [--out FILE]

A family is a reference and variants of it that compute as kernels do: other orders of sums, wider or narrower
accumulators, library calls, and what must not pass: lower precision, parts left out, approximations.  Each
runs on the data that a promotion uses, and its three errors are given in units of eager's own, at their
worst.  A variant is misjudged when an honest one fails or a dishonest one passes; of a few either verdict is
right.  TF32 is not allowed, in convolutions neither, so that eager's own error is float32's.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import platform
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from autokernel.judge.cases import CaseMaker, worst_e0
from autokernel.judge.compare import Measures, limits_for, measure
from autokernel.judge.inputs import InputSource, distributions_for
from autokernel.judge.subjects import load_reference
from autokernel.records import Port, Task
from autokernel.torch_flags import Tf32, set_tf32

SEEDS = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NARROW = ("bfloat16", "float16")
Fn = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Variant:
    """``dtypes``: where it means something; ``honest``: whether a user would want it, None if some would."""

    name: str
    honest: bool | None
    fn: Fn
    dtypes: tuple[str, ...] = tuple(DTYPES)


@dataclass(frozen=True)
class Family:
    """``forward``: body of the reference's forward; ``inputs``: name -> (shape or integers' bound, role)."""

    name: str
    forward: str
    inputs: dict[str, tuple[tuple[int, ...], str]]
    variants: list[Variant]
    high: dict[str, int] = dataclasses.field(default_factory=dict)


def good(name: str, fn: Fn, *dtypes: str) -> Variant:
    return Variant(name, True, fn, dtypes or tuple(DTYPES))


def bad(name: str, fn: Fn, *dtypes: str) -> Variant:
    return Variant(name, False, fn, dtypes or tuple(DTYPES))


def either(name: str, fn: Fn, *dtypes: str) -> Variant:
    return Variant(name, None, fn, dtypes or tuple(DTYPES))


# -- arithmetic that kernels do -----------------------------------------------------------------------


def mantissa(x: Tensor, bits: int) -> Tensor:
    """float32 rounded to so many bits after the point: 10 is TF32, 7 bfloat16."""
    drop = 23 - bits
    whole = x.float().contiguous().view(torch.int32)
    return ((whole + (1 << (drop - 1))) & ~((1 << drop) - 1)).view(torch.float32)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` with products and sums in float32, rounded once."""
    return (a.float() @ b.float().mT).to(a.dtype)


def split_k(a: Tensor, b: Tensor, parts: int = 4, *, keep: torch.dtype = torch.float32) -> Tensor:
    total = torch.zeros((), dtype=keep, device=a.device)
    for x, y in zip(a.chunk(parts, -1), b.chunk(parts, -1), strict=True):
        total = total + (x.float() @ y.float().mT).to(keep)
    return total.to(a.dtype)


def in_steps(a: Tensor, b: Tensor, step: int = 8) -> Tensor:
    """An accumulator of the inputs' own dtype, rounded after every ``step`` products."""
    return split_k(a, b, a.shape[-1] // step, keep=a.dtype)


def sum_of_three(a: Tensor, b: Tensor, bits: int) -> Tensor:
    """A float32 product from three of narrow ones (3xTF32, 3xBF16)."""
    big_a, big_b = mantissa(a, bits), mantissa(b, bits)
    small_a, small_b = mantissa(a - big_a, bits), mantissa(b - big_b, bits)
    return big_a @ big_b.mT + (big_a @ small_b.mT + small_a @ big_b.mT)


def fp8(x: Tensor) -> Tensor:
    scale = x.abs().amax().clamp_min(1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def sequential(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the last dim, one element after the other, in ``dtype``."""
    total = torch.zeros(x.shape[:-1], dtype=dtype, device=x.device)
    for i in range(x.shape[-1]):
        total = total + x[..., i].to(dtype)
    return total


def halved(x: Tensor) -> Tensor:
    """Sum over the last dim (a power of two), by halves."""
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x[..., 0]


# -- the families ---------------------------------------------------------------------------------------

EPS = 1e-5


def streamed_attention(
    q: Tensor, k: Tensor, v: Tensor, block: int = 32, *, last: int | None = None
) -> Tensor:
    """Keys and values stream past; softmax is kept online, in float32."""
    q, scale, kind = q.float(), q.shape[-1] ** -0.5, q.dtype
    top = torch.full((*q.shape[:-1], 1), -torch.inf, device=q.device)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for i in range(0, last or k.shape[-2], block):
        keys, values = (t[..., i : min(i + block, last or k.shape[-2]), :] for t in (k, v))
        s = q @ keys.float().mT * scale
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        p = (s - new).exp()
        fade = (top - new).exp()
        total, top = total * fade + p.sum(-1, keepdim=True), new
        out = out * fade + p.to(kind).float() @ values.float()
    return (out / total).to(kind)


def attention_in(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    q, k, v = (t.to(dtype) for t in (q, k, v))
    return F.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def norm(
    x: Tensor,
    w: Tensor,
    b: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    one_pass: bool = False,
    eps: float = EPS,
) -> Tensor:
    h = x.to(dtype)
    mean = h.mean(-1, keepdim=True)
    var = (
        (h * h).mean(-1, keepdim=True) - mean * mean
        if one_pass
        else (h - mean).square().mean(-1, keepdim=True)
    )
    return ((h - mean) * torch.rsqrt(var + eps) * w.to(dtype) + b.to(dtype)).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    a, b = x.to(dtype).chunk(2, -1)
    c, s = cos.to(dtype), sin.to(dtype)
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


def softmax(
    x: Tensor, *, top: bool = True, base_2: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    h = x.to(dtype)
    h = h - h.amax(-1, keepdim=True) if top else h
    e = torch.exp2(h * 1.4426950408889634) if base_2 else h.exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def nll(x: Tensor, t: Tensor, *, dtype: torch.dtype = torch.float32, last: int | None = None) -> Tensor:
    h = x.to(dtype)
    lse = torch.logsumexp(h[:, :last], -1)
    return (lse - h.gather(1, t[:, None])[:, 0]).to(x.dtype)


def winograd(x: Tensor, w: Tensor) -> Tensor:
    """F(2x2, 3x3): fewer products, larger errors, and what cuDNN does for float32."""
    bt = torch.tensor([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], dtype=torch.float32)
    g = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], dtype=torch.float32)
    at = torch.tensor([[1, 1, 1, 0], [0, 1, -1, -1]], dtype=torch.float32)
    bt, g, at = bt.to(x.device), g.to(x.device), at.to(x.device)
    tiles = F.pad(x.float(), (1, 1, 1, 1)).unfold(2, 4, 2).unfold(3, 4, 2)
    u, v = g @ w.float() @ g.T, bt @ tiles @ bt.T
    m = torch.einsum("ocij,ncxyij->noxyij", u, v)
    y = at @ m @ at.T
    n, o, rows, cols = y.shape[:4]
    return y.permute(0, 1, 2, 4, 3, 5).reshape(n, o, rows * 2, cols * 2).to(x.dtype)


def mlp(x: Tensor, g: Tensor, u: Tensor, d: Tensor, product: Fn = mm, act: Fn = F.silu) -> Tensor:
    return product((act(product(x, g)) * product(x, u)).to(x.dtype), d)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


P, A = "parameter", "activation"
LINEAR_VARIANTS = [
    good("float32 accumulator", mm),
    good("split-K, 4 parts", split_k),
    good("split-K, parts kept in 16 bits", lambda x, w: split_k(x, w, 4, keep=x.dtype), *NARROW),
    good("3xTF32", lambda x, w: sum_of_three(x, w, 10), "float32"),
    good("sums of 8 in a row", in_steps, "float32"),
    bad("16-bit accumulator", in_steps, *NARROW),
    bad(
        "last 1/64 of K left out",
        lambda x, w: mm(x[..., : -(x.shape[-1] // 64)], w[:, : -(w.shape[-1] // 64)]),
    ),
    bad("TF32", lambda x, w: mantissa(x, 10) @ mantissa(w, 10).mT, "float32"),
    bad("bfloat16", lambda x, w: mm(x.bfloat16(), w.bfloat16()).float(), "float32"),
    bad("fp8", lambda x, w: mm(fp8(x), fp8(w)).to(x.dtype), *NARROW),
    bad(
        "last row of tiles left out", lambda x, w: torch.cat([mm(x[:-8], w), torch.zeros_like(mm(x[-8:], w))])
    ),
]
FAMILIES = [
    Family(
        "attention",
        "return F.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v",
        dict.fromkeys("qkv", ((2, 4, 128, 64), A)),
        [
            good("library", F.scaled_dot_product_attention),
            good("streamed, float32 softmax", streamed_attention),
            good("all in float32", lambda q, k, v: attention_in(q, k, v, torch.float32).to(q.dtype)),
            bad("last keys left out", lambda q, k, v: streamed_attention(q, k, v, last=126)),
            bad("bfloat16", lambda q, k, v: attention_in(q, k, v, torch.bfloat16).float(), "float32"),
            bad("fp8 values", lambda q, k, v: streamed_attention(q, k, fp8(v)), *NARROW),
            bad(
                "no maximum taken off",
                lambda q, k, v: softmax(q @ k.mT * q.shape[-1] ** -0.5, top=False).to(q.dtype) @ v,
            ),
        ],
    ),
    Family("linear", "return F.linear(x, w)", {"x": ((256, 512), A), "w": ((384, 512), P)}, LINEAR_VARIANTS),
    Family(
        "sibling_linears",
        "return F.linear(x, a), F.linear(x, b)",
        {"x": ((256, 512), A), "a": ((128, 512), P), "b": ((64, 512), P)},
        [
            good("merged", lambda x, a, b: tuple(F.linear(x, torch.cat([a, b])).split([128, 64], -1))),
            good("float32 accumulator", lambda x, a, b: (mm(x, a), mm(x, b))),
            bad(
                "one row too far",
                lambda x, a, b: tuple(F.linear(x, torch.cat([a[1:], b, b[:1]])).split([128, 64], -1)),
            ),
            bad(
                "TF32", lambda x, a, b: tuple(mantissa(x, 10) @ mantissa(w, 10).mT for w in (a, b)), "float32"
            ),
        ],
    ),
    Family(
        "gated_mlp",
        "return F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)",
        {"x": ((128, 256), A), "g": ((512, 256), P), "u": ((512, 256), P), "d": ((256, 512), P)},
        [
            good("float32 accumulators", mlp),
            good("float32 between the products", lambda x, g, u, d: mlp(x.float(), g, u, d).to(x.dtype)),
            good("split-K", lambda x, g, u, d: mlp(x, g, u, d, split_k)),
            bad("16-bit accumulators", lambda x, g, u, d: mlp(x, g, u, d, in_steps), *NARROW),
            bad("GELU for SiLU", lambda x, g, u, d: mlp(x, g, u, d, mm, gelu)),
            bad("TF32", lambda *t: mlp(*t, lambda x, w: mantissa(x, 10) @ mantissa(w, 10).mT), "float32"),
        ],
    ),
    Family(
        "norm",
        f"return F.layer_norm(x, (x.shape[-1],), w, b, {EPS})",
        {"x": ((256, 768), A), "w": ((768,), P), "b": ((768,), P)},
        [
            good("two passes, float32", norm),
            good("float64", lambda x, w, b: norm(x, w, b, dtype=torch.float64)),
            bad(
                "all in 16 bits", lambda x, w, b: norm(x, w, b, dtype=x.dtype), *NARROW
            ),  # fails at an offset
            bad("eps left out", lambda x, w, b: norm(x, w, b, eps=0.0)),
            bad("one pass, float32", lambda x, w, b: norm(x, w, b, one_pass=True), "float32"),
            bad(
                "statistics of 63/64 of a row",
                lambda x, w, b: (
                    (x.float() - x[:, :-12].float().mean(-1, keepdim=True))
                    * torch.rsqrt(x[:, :-12].float().var(-1, correction=0, keepdim=True) + EPS)
                    * w
                    + b
                ).to(x.dtype),
            ),
            bad("bfloat16", lambda x, w, b: norm(x, w, b, dtype=torch.bfloat16), "float32"),
        ],
    ),
    Family(
        "rope",
        """a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)""",
        {"x": ((2, 4, 128, 64), A), "cos": ((128, 32), P), "sin": ((128, 32), P)},
        [
            good("float32, rounded once", rope),
            good(
                "as a product of complex numbers",
                lambda x, c, s: (
                    torch.view_as_real(
                        torch.complex(*x.float().chunk(2, -1)) * torch.complex(c.float(), s.float())
                    )
                    .movedim(-1, -2)
                    .flatten(-2)
                    .to(x.dtype)
                ),
            ),
            bad("one position late", lambda x, c, s: rope(x, c.roll(1, 0), s.roll(1, 0))),
            bad(
                "table in bfloat16", lambda x, c, s: rope(x, c.bfloat16(), s.bfloat16()), "float32", "float16"
            ),
        ],
    ),
    Family(
        "softmax",
        "return F.softmax(x, -1)",
        {"x": ((128, 1000), A)},
        [
            good("float32", softmax),
            good("powers of two", lambda x: softmax(x, base_2=True)),
            good(
                "reciprocal first",
                lambda x: (
                    (e := (x.float() - x.float().amax(-1, keepdim=True)).exp())
                    * (1 / e.sum(-1, keepdim=True))
                ).to(x.dtype),
            ),
            bad("no maximum taken off", lambda x: softmax(x, top=False)),
            bad(
                "last tile left out of the sum",
                lambda x: (
                    (e := (x.float() - x.float().amax(-1, keepdim=True)).exp())
                    / e[:, :-8].sum(-1, keepdim=True)
                ).to(x.dtype),
            ),
            bad("bfloat16", lambda x: softmax(x, dtype=torch.bfloat16), "float32", "float16"),
        ],
    ),
    Family(
        "cross_entropy",
        "return F.cross_entropy(x, t, reduction='none')",
        {"x": ((256, 1000), A), "t": ((256,), A)},
        [
            good("float32, rounded once", nll),
            good("float64", lambda x, t: nll(x, t, dtype=torch.float64)),
            bad("last tile left out", lambda x, t: nll(x, t, last=-8)),
            bad("bfloat16", lambda x, t: nll(x, t, dtype=torch.bfloat16), "float32"),
        ],
        {"t": 1000},
    ),
    Family(
        "reduction",
        "return x.sum(-1)",
        {"x": ((256, 1024), A)},
        [
            # Of 1024 float32 numbers, all near 100: an order that no library sums in, and that eager's on a
            # GPU, a tree, is an order of magnitude better than.
            either("one after the other, float32", lambda x: sequential(x, torch.float32), "float32"),
            good("one after the other, float32", lambda x: sequential(x, torch.float32).to(x.dtype), *NARROW),
            good(
                "in 32 lanes, float32",  # as a warp does
                lambda x: halved(sequential(x.unflatten(-1, (32, 32)).mT, torch.float32)),
                "float32",
            ),
            good("halves", lambda x: (x.float()[:, :512].sum(-1) + x.float()[:, 512:].sum(-1)).to(x.dtype)),
            bad("one after the other, 16 bits", lambda x: sequential(x, x.dtype), *NARROW),
            bad("last 1/64 left out", lambda x: x.float()[:, :-16].sum(-1).to(x.dtype)),
            bad("bfloat16", lambda x: sequential(x, torch.bfloat16).float(), "float32"),
        ],
    ),
    Family(
        "conv",
        "return F.conv2d(x, w, padding=1)",
        {"x": ((2, 16, 32, 32), A), "w": ((24, 16, 3, 3), P)},
        [
            good(
                "as a matrix product",
                lambda x, w: (
                    (w.float().flatten(1) @ F.unfold(x.float(), 3, padding=1)).view(2, 24, 32, 32).to(x.dtype)
                ),
            ),
            good(
                "channels last",
                lambda x, w: F.conv2d(
                    x.contiguous(memory_format=torch.channels_last), w, padding=1
                ).contiguous(),
            ),
            good("Winograd, float32", winograd),
            bad(
                "no padding at the corner",
                lambda x, w: (
                    F.conv2d(x, w, padding=1) * (torch.arange(1024, device=x.device).view(32, 32) > 0)
                ),
            ),
            bad("one channel left out", lambda x, w: F.conv2d(x[:, :-1], w[:, :-1], padding=1)),
            bad("TF32", lambda x, w: F.conv2d(mantissa(x, 10), mantissa(w, 10), padding=1), "float32"),
        ],
    ),
    Family(
        "embedding",
        "return F.embedding(i, e) + F.embedding(p, s)",
        {"i": ((4, 128), A), "p": ((4, 128), A), "e": ((1000, 256), P), "s": ((128, 256), P)},
        [
            good("float32, rounded once", lambda i, p, e, s: (e[i].float() + s[p].float()).to(e.dtype)),
            bad("next position", lambda i, p, e, s: e[i] + s[(p + 1) % 128]),
            bad(
                "bfloat16",
                lambda i, p, e, s: (e[i].bfloat16() + s[p].bfloat16()).to(e.dtype),
                "float32",
                "float16",
            ),
        ],
        {"i": 1000, "p": 128},
    ),
    Family(
        "pointwise",
        "return F.gelu(x + b, approximate='tanh')",
        {"x": ((256, 512), A), "b": ((512,), P)},
        [
            good("float32, rounded once", lambda x, b: gelu(x.float() + b.float()).to(x.dtype)),
            good(
                "step by step in the dtype",
                lambda x, b: (
                    (h := x + b) * 0.5 * (1 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h**3)))
                ),
                "float32",
            ),
            bad("erf for tanh", lambda x, b: F.gelu(x.float() + b.float()).to(x.dtype), "float32"),
            bad("a sigmoid for it", lambda x, b: gelu_by_sigmoid(x.float() + b.float()).to(x.dtype)),
            bad("bfloat16", lambda x, b: gelu(x.bfloat16() + b.bfloat16()).to(x.dtype), "float32", "float16"),
        ],
    ),
]


# -- the study ------------------------------------------------------------------------------------------


@dataclass
class Row:
    family: str
    variant: Variant
    dtype: str
    worst: Measures
    passed: bool
    why: str

    @property
    def misjudged(self) -> bool:
        return self.variant.honest is not None and self.passed != self.variant.honest


def task_of(family: Family, folder: Path, dtype: torch.dtype, device: str) -> Task:
    reference = (
        "import torch\nimport torch.nn.functional as F\n\n\nclass Model(torch.nn.Module):\n"
        f"    def forward(self, {', '.join(family.inputs)}):\n        {family.forward}\n"
    )
    folder.mkdir(parents=True)
    (folder / "reference.py").write_text(reference)

    def port(name: str, shape: tuple[int, ...], role: str) -> Port:
        kind = "int64" if name in family.high else str(dtype).removeprefix("torch.")
        stride = torch.empty(shape, device="meta").stride()
        return Port(name, shape, kind, stride, role, family.high.get(name))  # type: ignore[arg-type]

    ports = [port(name, shape, role) for name, (shape, role) in family.inputs.items()]
    return Task(1, family.name, "0" * 32, device, 1, [], ports, [], dir=folder)  # type: ignore[arg-type]


def study(family: Family, key: str, device: str, folder: Path) -> list[Row]:
    where = torch.device(device)
    task = task_of(family, folder / f"{family.name}-{key}", DTYPES[key], device)
    maker = CaseMaker(InputSource(task, where), load_reference(task.dir / "reference.py", where))
    kinds = distributions_for(task, "promote")
    cases = {kind: [maker.make(kind) for _ in range(SEEDS)] for kind in kinds}
    e0 = {kind: worst_e0(found) for kind, found in cases.items()}
    rows = []
    for variant in family.variants:
        if key not in variant.dtypes:
            continue
        worst, passed, why = Measures(), True, ""
        for kind, found in cases.items():
            for case in found:
                with torch.no_grad():
                    made = variant.fn(*case.inputs)
                outputs = list(made) if isinstance(made, tuple) else [made]
                result = maker.check(case, outputs, e0[kind])
                if not result.ok and passed:
                    passed, why = False, result.reason
                for got, exact, eager, unit in zip(outputs, case.exact, case.eager, e0[kind], strict=True):
                    counted = torch.isfinite(exact) & torch.isfinite(eager) & torch.isfinite(got)
                    errors, _ = measure(got, exact, counted)
                    worst = worst.largest(
                        Measures(
                            *(a / b if b else 0.0 for a, b in zip(_three(errors), _three(unit), strict=True))
                        )
                    )
        rows.append(Row(family.name, variant, key, worst, passed, why))
    return rows


def _three(m: Measures) -> tuple[float, float, float]:
    return m.frobenius, m.peak, m.tile


def table(rows: list[Row], device: str) -> str:
    lines = [
        f"{platform.machine()}, {device}, torch {torch.__version__}, {datetime.date.today()}; {SEEDS} seeds "
        f"of each kind of data; errors in units of eager's own, at their worst",
        "",
        "| | honest, worst | limit | dishonest, mildest that fails by error | misjudged |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, keys in (("16 bits", NARROW), ("float32", ("float32",))):
        chosen = [r for r in rows if r.dtype in keys]
        limits = _three(limits_for(DTYPES[keys[0]]))  # type: ignore[arg-type]
        honest = [_three(r.worst) for r in chosen if r.variant.honest]
        caught = [_three(r.worst) for r in chosen if r.variant.honest is False and "eager's own" in r.why]
        mildest = min(max(x / y for x, y in zip(three, limits, strict=True)) for three in caught)
        wrong = sum(r.misjudged for r in chosen)
        worst = " / ".join(f"{max(three[i] for three in honest):.2f}" for i in range(3))
        allowed = " / ".join(f"{x:g}" for x in limits)
        lines.append(f"| {name} | {worst} | {allowed} | {mildest:.2f}x a limit | {wrong} of {len(chosen)} |")
    lines += [
        "",
        "| family | variant | dtype | honest | Frobenius | peak | tile | judged | why |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        figures = [f"{x:.3g}" for x in _three(r.worst)]
        judged = "passes" if r.passed else "fails"
        judged += " (misjudged)" if r.misjudged else ""
        honesty = {True: "yes", False: "no", None: "either"}[r.variant.honest]
        why = r.why.partition(";")[0][:110]
        cells = [r.family, r.variant.name, r.dtype, honesty, *figures, judged, why]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--family", action="append", choices=[f.name for f in FAMILIES])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    set_tf32(Tf32(products=False, convolutions=False))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            if not args.family or family.name in args.family:
                for key in DTYPES:
                    rows += study(family, key, args.device, Path(folder))
    text = table(rows, args.device)
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
