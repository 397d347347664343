"""Generated kernels against float64: C++ ones run here, Triton ones in the interpreter and cross-compiled.

Run as a script, this file is the worker of its own tests: ``interpret`` checks every Triton case under
TRITON_INTERPRET=1, ``compile`` cross-compiles kernels of real sizes for sm_90 (H100, H200).  Both print JSON.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LIMITS = {torch.float32: (10.0, 32.0), torch.float16: (3.0, 4.0), torch.bfloat16: (3.0, 4.0)}
INF = float("-inf")


def up(x):
    """Like ``.float()`` in a model, but leaves float64 alone, so that the reference stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x, w):
    h = up(x)
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * w


def rotate_half(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def complex_rope(q, k, f):
    q_ = torch.view_as_complex(up(q).reshape(*q.shape[:-1], -1, 2))
    k_ = torch.view_as_complex(up(k).reshape(*k.shape[:-1], -1, 2))
    f = f.view(1, q_.shape[1], 1, q_.shape[3])
    return torch.view_as_real(q_ * f).flatten(3).type_as(q), torch.view_as_real(k_ * f).flatten(3).type_as(k)


def tanh_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def naive_attention(qkv, m):
    batch, length, width = qkv.shape
    width //= 3
    q, k, v = (t.view(batch, length, 3, width // 3).transpose(1, 2) for t in qkv.split(width, 2))
    s = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.shape[-1]))
    s = s.masked_fill(~m[:, :, :length, :length], INF)
    return (F.softmax(s, -1) @ v).transpose(1, 2).contiguous().view(batch, length, width)


def grouped_attention(q, k, v, mask):
    batch, length, heads, dim = q.shape
    repeats = heads // k.shape[2]

    def repeat(x):
        return x[:, :, :, None, :].expand(batch, length, heads // repeats, repeats, dim).reshape(q.shape)

    q, k, v = q.transpose(1, 2), repeat(k).transpose(1, 2), repeat(v).transpose(1, 2)
    s = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(dim) + mask
    w = F.softmax(up(s), dim=-1).type_as(q)
    return torch.matmul(w, v).transpose(1, 2).contiguous().view(batch, length, -1)


def causal(n):
    return torch.tril(torch.ones(n, n, dtype=torch.bool)).view(1, 1, n, n)


def angles(length, pairs):
    return torch.polar(torch.ones(length, pairs), torch.randn(length, pairs))


# name -> (function, arguments given a maker of random tensors of the dtype under test)
FUSED: dict[str, tuple[Callable, Callable]] = {
    "residual_layer_norm": (
        lambda x, y, w, b: (x + y, F.layer_norm(x + y, (100,), w, b)),
        lambda t: (t(2, 3, 100), t(2, 3, 100), t(100), t(100)),
    ),
    "layer_norm_offset": (lambda x: F.layer_norm(x + 100.0, (96,)), lambda t: (t(5, 96),)),
    "rms_norm": (rms_norm, lambda t: (t(2, 7, 96), t(96))),
    "softmax": (lambda x: F.softmax(x, -1).transpose(1, 2), lambda t: (t(2, 3, 65),)),
    "masked_softmax": (
        lambda x, m: F.softmax((x * 0.125).masked_fill(~m[:, :, :5, :5], INF), -1),
        lambda t: (t(2, 3, 5, 5), causal(9)),
    ),
    "fully_masked_row": (
        lambda x, m: F.softmax(x.masked_fill(m, INF), -1),
        lambda t: (t(4, 33), (torch.arange(4) == 2)[:, None].expand(4, 33).contiguous()),
    ),
    "softmax_dim1": (lambda x: F.softmax(x, 1), lambda t: (t(2, 30, 50),)),
    "long_log_softmax": (lambda x: F.log_softmax(x, -1), lambda t: (t(3, 20011),)),
    "long_layer_norm": (lambda x, w: F.layer_norm(x, (16500,), w), lambda t: (t(2, 16500), t(16500))),
    "rope": (rotate_half, lambda t: (t(2, 3, 4, 16), t(3, 1, 16), t(3, 1, 16))),
    "complex_rope": (complex_rope, lambda t: (t(2, 3, 4, 16), t(2, 3, 2, 16), angles(3, 8))),
    "embeddings": (
        lambda a, b, i: F.embedding(i, a) + F.embedding(torch.arange(i.shape[1]), b),
        lambda t: (t(50, 16), t(7, 16), torch.randint(0, 50, (2, 7))),
    ),
    "tanh_gelu": (tanh_gelu, lambda t: (t(2, 3, 1000),)),
    "bias_gelu": (lambda x, b: F.gelu(x + b), lambda t: (t(2, 3, 200), t(200))),
    "silu_mul": (lambda x, y: F.silu(x) * y, lambda t: (t(2, 3, 100), t(2, 3, 100))),
    "packed_swiglu": (lambda x: F.silu(x[..., :50]) * x[..., 50:], lambda t: (t(2, 3, 100),)),
    "mean_of_all": (lambda x: x.mean(), lambda t: (t(2, 3, 100),)),
    "row_stats": (lambda x: (x.sum(-1), x.amax(-1, keepdim=True), x.var(-1)), lambda t: (t(2, 3, 100),)),
    "mean_dim1": (lambda x: x.mean(1), lambda t: (t(2, 30, 50),)),
    "amax_of_nan": (lambda x: (x / (x > -9).logical_not()).amax(-1), lambda t: (t(4, 40),)),
    "cross_entropy": (
        lambda x, i: F.cross_entropy(x, i, reduction="none"),
        lambda t: (t(6, 200), torch.randint(0, 200, (6,))),
    ),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 1)) * 2, lambda t: (t(6, 20),)),
    "cat_rows": (lambda x, y: torch.cat([x, y], 0) + 1, lambda t: (t(6, 20), t(3, 20))),
    "stack_last": (lambda x, y: torch.stack([x, y], -1).flatten(-2), lambda t: (t(4, 64), t(4, 64))),
    "transpose": (lambda x: (x.transpose(1, 2) * 2).contiguous(), lambda t: (t(2, 6, 20),)),
    "merge_heads": (lambda x: x.permute(0, 2, 1, 3).contiguous().view(2, 5, 24), lambda t: (t(2, 6, 5, 4),)),
    "batch_norm": (
        lambda x, m, v, w, b: F.relu(F.batch_norm(x, m, v, w, b)),
        lambda t: (t(2, 6, 5, 4), t(6), t(6).abs() + 0.1, t(6), t(6)),
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), lambda t: (t(2, 6, 20), t(6), t(6))),
    "comparison": (lambda x: (x > 0) & (x < 1), lambda t: (t(2, 65),)),
    "causal_bias": (lambda x: x + torch.full((8, 8), INF).triu(1).to(x.dtype), lambda t: (t(2, 8, 8),)),
    "zoo": (
        lambda x: (
            torch.sin(x) + torch.cos(x) + F.softplus(x) + F.elu(x) + F.hardswish(x) + F.leaky_relu(x, 0.1)
            + F.mish(x) + torch.log1p(x.abs()) + torch.sigmoid(x) + x.clamp(-1, 1) + torch.expm1(x)
            + 2.0**x + x.abs() ** 1.5
        ),
        lambda t: (t(4, 64),),
    ),
    "in_place": (lambda x: x.clone().add_(1).relu_().mul_(2), lambda t: (t(4, 64),)),
    "relu_of_nan": (lambda x: F.relu(x / x.abs().clamp(max=0)), lambda t: (t(4, 64),)),
    "gather": (lambda x, i: torch.gather(x, 1, i) * 2, lambda t: (t(4, 30), torch.randint(0, 30, (4, 7)))),
    "index": (lambda x, i: x[:, i] + 1, lambda t: (t(4, 30), torch.randint(-30, 30, (5,)))),
}  # fmt: skip
MIXED: dict[str, tuple[Callable, Callable]] = {
    "linear_gelu": (
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        lambda t: (t(2, 7, 40), t(50, 40), t(50)),
    ),
    "linear_residual": (
        lambda x, w, b, r: r + F.linear(x, w, b),
        lambda t: (t(2, 7, 40), t(50, 40), t(50), t(2, 7, 50)),
    ),
    "siblings": (
        lambda x, a, b, c: (F.linear(x, a), F.linear(x, b), F.linear(x, c)),
        lambda t: (t(2, 7, 40), t(50, 40), t(30, 40), t(30, 40)),
    ),
    "gated_mlp": (
        lambda x, a, b, c: F.linear(F.silu(F.linear(x, a)) * F.linear(x, b), c),
        lambda t: (t(2, 7, 40), t(50, 40), t(50, 40), t(40, 50)),
    ),
    "matmul": (lambda x, a: torch.matmul(x, a) * 2, lambda t: (t(2, 7, 40), t(40, 50))),
    "heads": (
        lambda x, a: F.linear(x, a).view(2, 7, 5, 10).transpose(1, 2),
        lambda t: (t(2, 7, 40), t(50, 40)),
    ),
    "naive_attention": (naive_attention, lambda t: (t(1, 20, 144), causal(32))),
    "grouped_attention": (
        grouped_attention,
        lambda t: (t(1, 20, 4, 16), t(1, 20, 2, 16), t(1, 20, 2, 16), torch.full((20, 20), INF).triu(1)),
    ),
    "sdpa_causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda t: (t(2, 3, 20, 16), t(2, 3, 20, 16), t(2, 3, 20, 16)),
    ),
    "sdpa_mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.3),
        lambda t: (t(2, 3, 20, 16), t(2, 3, 33, 16), t(2, 3, 33, 16), torch.rand(2, 1, 20, 33) > 0.3),
    ),
    "norm_linear": (
        lambda x, w, b, a: F.linear(F.layer_norm(x, (40,), w, b), a),
        lambda t: (t(2, 7, 40), t(40), t(40), t(50, 40)),
    ),
    "mean_cross_entropy": (
        lambda x, i: F.cross_entropy(x, i),
        lambda t: (t(9, 200), torch.tensor([0, 1, -100, 199, 7, 7, 7, 7, 8])),
    ),
    "mean_then_norm": (
        lambda x: F.layer_norm(x.mean(1), (24,)) + x.amax(1),
        lambda t: (t(3, 11, 24),),
    ),
    "conv_bn_relu": (
        lambda x, w, m, v: F.relu(F.batch_norm(F.conv2d(x, w, padding=1), m, v)),
        lambda t: (t(2, 4, 6, 6), t(8, 4, 3, 3), t(8), t(8).abs() + 0.1),
    ),
}
# real sizes, for what the compiler makes of them
REAL: dict[str, tuple[Callable, Callable]] = {
    "gpt2_residual_norm": (
        lambda x, y, w, b: (x + y, F.layer_norm(x + y, (768,), w, b)),
        lambda t: (t(1, 1024, 768), t(1, 1024, 768), t(768), t(768)),
    ),
    "gpt2_softmax": (
        lambda x, m: F.softmax((x * 0.125).masked_fill(~m[:, :, :1024, :1024], INF), -1),
        lambda t: (t(1, 12, 1024, 1024), causal(1024)),
    ),
    "llama_rope": (complex_rope, lambda t: (t(1, 512, 12, 64), t(1, 512, 4, 64), angles(512, 32))),
    "llama_norm": (rms_norm, lambda t: (t(1, 512, 768), t(768))),
    "wide_rms_norm": (rms_norm, lambda t: (t(64, 16384), t(16384))),
    "vocabulary_softmax": (lambda x: F.softmax(x, -1), lambda t: (t(64, 50257),)),
    "gpt2_mlp_in": (
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        lambda t: (t(1, 1024, 768), t(3072, 768), t(3072)),
    ),
    "llama_gate_up": (
        lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b),
        lambda t: (t(1, 512, 768), t(2048, 768), t(2048, 768)),
    ),
    "gpt2_attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda t: (t(1, 12, 1024, 64), t(1, 12, 1024, 64), t(1, 12, 1024, 64)),
    ),
    "llama_attention": (
        grouped_attention,
        lambda t: (
            t(1, 512, 12, 64),
            t(1, 512, 4, 64),
            t(1, 512, 4, 64),
            torch.full((512, 512), INF).triu(1),
        ),
    ),
}


def captured(fn: Callable, args: tuple):
    """``(graph, arguments in placeholder order)`` of a function, as Dynamo hands it to a backend."""
    found = []

    def backend(gm, _):
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=False)(*args)
    (gm,) = found
    names = [n.name.lower().strip("_").removeprefix("l_") for n in gm.graph.nodes if n.op == "placeholder"]
    parameters = list(inspect.signature(fn).parameters)
    return gm, [args[parameters.index(name)] for name in names]


def arguments(make: Callable, dtype: torch.dtype) -> tuple:
    torch.manual_seed(0)
    args = make(lambda *shape: torch.randn(*shape).to(dtype))
    # masks and tables made without the maker follow the dtype of the model
    return tuple(a.to(dtype) if a.dtype == torch.float32 else a for a in args)


def attempt(run: Callable[[], str]) -> str:
    """``run()``, or "skipped": an old Triton's interpreter can't take a loop bound from NumPy >= 2.4."""
    import numpy
    import triton

    version = tuple(int(p) for p in triton.__version__.split(".")[:2])
    try:
        return run()
    except triton.runtime.errors.InterpreterError as problem:
        old = version < (3, 9) and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0"
        if old and "only 0-dimensional arrays" in str(problem):
            return "skipped"
        raise


def double(x):
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x


def error(fn: Callable, args: tuple, results, dtype: torch.dtype) -> str:
    """Empty when ``results`` are as good as eager's, by the limits of the judge; else what is wrong."""
    with torch.no_grad():
        eager, truth = fn(*args), fn(*[double(a) for a in args])
    eager, truth, results = (
        (x,) if isinstance(x, torch.Tensor) else tuple(x) for x in (eager, truth, results)
    )
    for mine, theirs, exact in zip(results, eager, truth, strict=True):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype or mine.stride() != theirs.stride():
            got, want = ((x.dtype, x.shape, x.stride()) for x in (mine, theirs))
            return f"{got}, not {want}"
        if not mine.is_floating_point():
            if not torch.equal(mine, theirs):
                return "differs"
            continue
        if not torch.equal(mine.isnan(), exact.isnan()) or not torch.equal(mine.isinf(), exact.isinf()):
            return "NaN or Inf elsewhere"
        keep = exact.isfinite()
        away, away0 = (mine.double() - exact)[keep], (theirs.double() - exact)[keep]
        if not away.numel():
            continue
        floor = torch.finfo(dtype).eps * exact[keep].square().mean().sqrt()
        frobenius, largest = LIMITS[dtype]
        rms, rms0 = away.square().mean().sqrt(), away0.square().mean().sqrt()
        if rms > frobenius * torch.maximum(rms0, floor / 2):
            return f"rms error {rms:.3g}, eager {rms0:.3g}"
        if away.abs().max() > largest * torch.maximum(away0.abs().max(), floor):
            return f"max error {away.abs().max():.3g}, eager {away0.abs().max():.3g}"
    return ""


def written(source: str, folder: Path, name: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    return path


def run_case(
    fn: Callable, make: Callable, dtype: torch.dtype, backend: str, mixed: bool, folder: Path, name: str
) -> str:
    from autokernel.backends import load_kernel
    from autokernel.playbook.codegen import generate

    args = arguments(make, dtype)
    gm, ordered = captured(fn, args)
    made = generate(gm, backend, mixed=mixed)
    if made.source is None:
        return f"not generated: {made.reason}"
    kernel = load_kernel(written(made.source, folder, name))
    before = [a.clone() for a in ordered]
    results = kernel.fn(*ordered)
    if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(ordered, before, strict=True)):
        return "changed its inputs"
    if problem := error(fn, args, results, dtype):
        return problem
    # the same values in another layout
    moved = [strided(a) for a in ordered]
    try:
        gm(*moved)
    except RuntimeError:  # the model itself can't read such a layout
        return ""
    return error(fn, args, kernel.fn(*moved), dtype) and "wrong on strided inputs"


def strided(x: torch.Tensor) -> torch.Tensor:
    """The values of ``x`` with gaps between the last dim's elements and an offset."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] * 2 + 1, dtype=x.dtype) if x.dim() else x
    return wide[..., 1::2].copy_(x) if x.dim() else x


# ---- workers ----


def interpret(only: list[str]) -> dict[str, str]:
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        for group, cases in (("fused", FUSED), ("mixed", MIXED)):
            for name, (fn, make) in cases.items():
                for key, dtype in DTYPES.items():
                    # the interpreter multiplies bfloat16 matrices as if they were integers
                    if (only and key not in only) or (group == "mixed" and key == "bfloat16"):
                        continue
                    label = f"{name}-{key}"
                    place = Path(folder), label.replace("-", "_")
                    out[label] = attempt(
                        lambda c=(fn, make, dtype, "triton", group == "mixed", *place): run_case(*c)
                    )
    return out


POINTER = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64",
    torch.int32: "*i32", torch.bool: "*i1", torch.uint8: "*u8",
}  # fmt: skip


def compile_for_hopper(jit_function, args, options: dict) -> dict:
    """Cross-compile one launch for sm_90: registers, spilled bytes, shared memory, whether it uses wgmma."""
    import re

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    options = dict(options)
    launch = {k: options.pop(k) for k in ("num_warps", "num_stages") if k in options}
    values = {**dict(zip(jit_function.arg_names, args, strict=False)), **options}
    signature, constants, attributes = {}, {}, {}
    for k, name in enumerate(jit_function.arg_names):
        value = values[name]
        if jit_function.params[k].is_constexpr or (type(value) is int and value == 1):
            signature[name], constants[(k,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTER[value.dtype]
            attributes[(k,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(k,)] = [["tt.divisibility", 16]]
    source = ASTSource(jit_function, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
    return {
        "spills": spills,
        "registers": registers,
        "shared": made.metadata.shared,
        "wgmma": "wgmma" in made.asm["ptx"],
    }


def replay_launches(results: list[dict]) -> None:
    """From now on a Triton launch compiles for sm_90 instead of running; facts go to ``results``."""
    from triton.runtime.jit import JITFunction

    def run(self, *args, grid=None, warmup=False, **options):
        results.append({"kernel": self.fn.__name__, **compile_for_hopper(self, args, options)})

    JITFunction.run = run  # type: ignore[method-assign]


def cross_compile(dtypes: list[str]) -> dict[str, list[dict]]:
    from autokernel.backends import load_kernel
    from autokernel.playbook.codegen import generate

    facts: list[dict] = []
    replay_launches(facts)
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (fn, make) in REAL.items():
            for key in dtypes:
                gm, ordered = captured(fn, arguments(make, DTYPES[key]))
                made = generate(gm, "triton")
                assert made.source is not None, made.reason
                facts.clear()
                load_kernel(written(made.source, Path(folder), f"{name}_{key}")).fn(*ordered)
                out[f"{name}-{key}"] = list(facts)
    return out


# ---- tests ----


def worker(mode: str, *args: str, interpreter: bool, script: str = __file__) -> dict:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("TRITON_INTERPRET", None)
    if interpreter:
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-W", "ignore", script, mode, *args]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


BESIDE = ThreadPoolExecutor(1)


@functools.cache
def beside(mode: str, *args: str, interpreter: bool, script: str = __file__) -> Future[dict]:
    """`worker`, beside whatever is going on; `pytest.mark.beside` starts it before the first test."""
    return BESIDE.submit(worker, mode, *args, interpreter=interpreter, script=script)


@pytest.mark.beside(lambda: beside("interpret", interpreter=True))
def test_triton_in_the_interpreter():
    pytest.importorskip("triton")
    interpreted = beside("interpret", interpreter=True).result()
    expected = len(FUSED) * 3 + len(MIXED) * 2
    assert len(interpreted) == expected
    assert {name: problem for name, problem in interpreted.items() if problem not in ("", "skipped")} == {}
    assert sum(problem == "skipped" for problem in interpreted.values()) < 10


@pytest.mark.beside(lambda: beside("compile", "float16", interpreter=False))
def test_triton_for_hopper():
    pytest.importorskip("triton")
    facts = beside("compile", "float16", interpreter=False).result()
    assert set(facts) == {f"{name}-float16" for name in REAL}
    for name, kernels in facts.items():
        assert kernels, name
        for k in kernels:
            assert k["spills"] == 0, (name, k)
            assert k["shared"] <= 227 * 1024, (name, k)
    for name in ("gpt2_mlp_in", "llama_gate_up", "gpt2_attention", "llama_attention"):
        assert all(k["wgmma"] for k in facts[f"{name}-float16"]), name  # the tensor cores' own instruction


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_triton_for_hopper_other_dtypes(dtype):
    pytest.importorskip("triton")
    for name, kernels in worker("compile", dtype, interpreter=False).items():
        assert all(k["spills"] == 0 and k["shared"] <= 227 * 1024 for k in kernels), (name, kernels)


def has_compiler() -> bool:
    from autokernel.backends import cpp_backend

    return cpp_backend.available("cpu")[0]


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSED)
def test_cpp_fused(name, dtype, tmp_path):
    fn, make = FUSED[name]
    assert run_case(fn, make, DTYPES[dtype], "cpp", False, tmp_path, "kernel") == ""


@needs_compiler
@pytest.mark.parametrize("name", [n for n in MIXED if n not in ("siblings", "heads")])
def test_cpp_with_library_calls(name, tmp_path):
    fn, make = MIXED[name]
    if name.startswith("sdpa"):
        pytest.skip("nothing but a library call in it")
    assert run_case(fn, make, torch.float32, "cpp", True, tmp_path, "kernel") == ""


@pytest.mark.parametrize("name", [*FUSED, *MIXED])
def test_as_plain_torch_code(name, tmp_path):
    fn, make = {**FUSED, **MIXED}[name]
    assert run_case(fn, make, torch.float32, "torch", True, tmp_path, "kernel") == ""


@needs_compiler
def test_cpp_float64(tmp_path):
    from autokernel.backends import load_kernel
    from autokernel.playbook.codegen import generate

    def fn(x):
        return F.layer_norm(F.gelu(x) * torch.tanh(x), (64,))

    x = torch.randn(4, 64, dtype=torch.float64)
    gm, ordered = captured(fn, (x,))
    made = generate(gm, "cpp", mixed=False)
    assert made.source is not None
    torch.testing.assert_close(
        load_kernel(written(made.source, tmp_path, "k")).fn(*ordered)[0], fn(x), rtol=1e-12, atol=1e-12
    )
    assert generate(gm, "triton", mixed=False) == (None, "torch.float64 in Triton")


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (lambda x: torch.cumsum(x, 0), (torch.randn(4, 4),), "the op cumsum"),
        (lambda x: x.sum(-1, keepdim=True) + x.sum(0), (torch.randn(4, 6),), "different extents"),
        (lambda x: F.dropout(x, 0.5, True), (torch.randn(4, 6),), "random"),
        (lambda x: x.add_(1), (torch.randn(4, 6),), "writes to an input"),
    ],
)  # fmt: skip
def test_refuses_with_a_reason(fn, args, reason):
    from autokernel.playbook.codegen import generate

    gm, _ = captured(fn, args)
    for backend in ("triton", "cpp"):
        made = generate(gm, backend, mixed=False)
        assert made.source is None
        assert reason in made.reason
        assert "\n" not in made.reason


def test_wrong_shape_is_refused(tmp_path):
    from autokernel.backends import load_kernel
    from autokernel.playbook.codegen import generate

    gm, _ = captured(lambda x: torch.relu(x) * 2, (torch.randn(4, 6),))
    made = generate(gm, "cpp" if has_compiler() else "torch")
    assert made.source is not None
    kernel = load_kernel(written(made.source, tmp_path, "k"))
    assert kernel.shapes == "fixed"
    if has_compiler():
        with pytest.raises(ValueError, match="generated for"):
            kernel.fn(torch.randn(4, 7))
        with pytest.raises(ValueError, match="generated for"):
            kernel.fn(torch.randn(4, 6).half())


def test_known_masks_are_recognised():
    """With the mask's values at hand the kernel does not read it, and skips what lies above the diagonal."""
    from autokernel.playbook.codegen import generate

    args = arguments(MIXED["naive_attention"][1], torch.float16)
    gm, _ = captured(naive_attention, args)
    mask = next(n.name for n in gm.graph.nodes if n.op == "placeholder" and n.name.strip("_").endswith("m"))
    plain, known = generate(gm, "triton"), generate(gm, "triton", constants={mask: args[1]})
    assert plain.source is not None and known.source is not None
    assert "m_ptr" in plain.source and "m_ptr" not in known.source
    assert "(pid_m + 1) * BLOCK_M" in known.source and "(pid_m + 1) * BLOCK_M" not in plain.source
    other = generate(gm, "triton", constants={mask: torch.rand(args[1].shape) > 0.5})
    assert other.source is not None and "m_ptr" in other.source


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        print(json.dumps(interpret(sys.argv[2:])))
    else:
        print(json.dumps(cross_compile(sys.argv[2:])))
