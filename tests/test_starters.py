"""Starters against float64 in Triton's interpreter and cross-compiled for sm_90; `starter_for` on regions.

Run as a script this file is the worker of its own tests (see test_codegen).
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_codegen import (
    DTYPES,
    ROOT,
    angles,
    attempt,
    beside,
    captured,
    compile_for_hopper,
    complex_rope,
    error,
    has_compiler,
    replay_launches,
    rms_norm,
    rotate_half,
    up,
    written,
)  # fmt: skip

assert compile_for_hopper


def softmax_masked(x, m):
    return F.softmax(x.masked_fill(~m, float("-inf")) if m.dtype == torch.bool else x + m, -1)


def silu_gate(a, b):
    return F.silu(a) * b


def both_ropes(q, k, cos, sin):
    cos, sin = cos[:, None, :], sin[:, None, :]
    return rotate_half(q, cos, sin), rotate_half(k, cos, sin)


def attend(q, k, v, mask=None):
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    s = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    s = s + torch.full(s.shape[-2:], float("-inf"), dtype=s.dtype).triu(1)
    return F.softmax(up(s if mask is None else s + mask), -1).type_as(q) @ v


# starter -> (reference, arguments at odd sizes) pairs; t makes random tensors
CASES = {
    "layer_norm": [
        (lambda x, w, b: F.layer_norm(x, (77,), w, b), lambda t: (t(3, 5, 77), t(77), t(77))),
        (
            lambda x, w, b, r: (F.layer_norm(x + r, (77,), w, b), x + r),
            lambda t: (t(3, 5, 77), t(77), t(77), t(3, 5, 77)),
        ),
    ],
    "rms_norm": [
        (rms_norm, lambda t: (t(3, 5, 77), t(77))),
        (lambda x, w, r: (rms_norm(x + r, w), x + r), lambda t: (t(3, 5, 77), t(77), t(3, 5, 77))),
    ],
    "softmax": [
        (lambda x: F.softmax(x, -1), lambda t: (t(3, 5, 77),)),
        (softmax_masked, lambda t: (t(3, 5, 77), torch.rand(5, 77) > 0.3)),
        (softmax_masked, lambda t: (t(3, 5, 77), t(3, 1, 77))),
    ],
    "gated_activation": [(silu_gate, lambda t: (t(3, 5, 77), t(3, 5, 77)))],
    "matmul": [
        (lambda x, w: F.linear(x, w), lambda t: (t(3, 50, 77), t(67, 77))),
        (lambda x, w, b: F.linear(x, w, b), lambda t: (t(3, 50, 128), t(67, 128), t(67))),
        (lambda x, w, b, r: F.linear(x, w, b) + r, lambda t: (t(3, 50, 77), t(67, 77), t(67), t(3, 50, 67))),
    ],
    "cross_entropy": [
        (
            lambda x, i: F.cross_entropy(x if x.dtype == torch.float64 else x.float(), i),
            lambda t: (t(9, 5003), torch.tensor([0, 1, -100, 5002, 7, 7, 7, 7, 8])),
        ),
    ],
    "row_reduction": [(lambda x: x.sum(-1), lambda t: (t(3, 5, 5003),))],
    "rope": [(both_ropes, lambda t: (t(2, 5, 3, 24), t(2, 5, 1, 24), t(5, 24), t(5, 24)))],
    "rope_complex": [(complex_rope, lambda t: (t(2, 5, 3, 24), t(2, 5, 1, 24), angles(5, 12)))],
    "attention": [
        (attend, lambda t: (t(2, 4, 150, 24), t(2, 2, 150, 24), t(2, 2, 150, 24))),
        (attend, lambda t: (t(2, 4, 33, 24), t(2, 4, 33, 24), t(2, 4, 33, 24), t(1, 1, 33, 33))),
    ],
}
REAL = {
    "layer_norm": lambda t: (t(8192, 4096), t(4096), t(4096)),
    "rms_norm": lambda t: (t(8192, 8192), t(8192)),
    "softmax": lambda t: (t(8192, 8192),),
    "gated_activation": lambda t: (t(4096, 2048), t(4096, 2048)),
    "matmul": lambda t: (t(1024, 768), t(3072, 768), t(3072)),
    "cross_entropy": lambda t: (t(64, 32000), torch.zeros(64, dtype=torch.int64)),
    "row_reduction": lambda t: (t(8192, 8192),),
    "rope": lambda t: (t(1, 512, 12, 64), t(1, 512, 4, 64), t(512, 64), t(512, 64)),
    "rope_complex": lambda t: (t(1, 512, 12, 64), t(1, 512, 4, 64), angles(512, 32)),
    "attention": lambda t: (t(1, 12, 1024, 64), t(1, 4, 1024, 64), t(1, 4, 1024, 64)),
}
DOTS = ("matmul", "attention")  # the interpreter multiplies bfloat16 matrices as if they were integers


def interpret() -> dict[str, str]:
    from autokernel.backends import load_kernel
    from autokernel.playbook.starters import STARTERS, starter_path

    out = {}
    for name in STARTERS:
        kernel = load_kernel(starter_path(name))
        for key, dtype in DTYPES.items():
            if name in DOTS and key == "bfloat16":
                continue
            for k, (fn, make) in enumerate(CASES[name]):
                torch.manual_seed(1)
                args = make(lambda *shape, d=dtype: torch.randn(*shape).to(d))
                out[f"{name}-{k}-{key}"] = attempt(
                    lambda c=(fn, args, kernel, dtype): error(c[0], c[1], c[2].fn(*c[1]), c[3])
                )
    return out


def cross_compile(key: str) -> dict[str, list[dict]]:
    from autokernel.backends import load_kernel
    from autokernel.playbook.starters import STARTERS, starter_path

    facts: list[dict] = []
    replay_launches(facts)
    out = {}
    for name in STARTERS:
        facts.clear()
        load_kernel(starter_path(name)).fn(*REAL[name](lambda *shape: torch.randn(*shape).to(DTYPES[key])))
        out[name] = list(facts)
    return out


def own_worker(*args: str, interpreter: bool) -> Future[dict]:
    return beside(*args, interpreter=interpreter, script=__file__)


def test_every_starter_has_cases():
    from autokernel.backends import read_kernel
    from autokernel.playbook.starters import STARTERS, starter_path
    from autokernel.records import FAMILIES

    assert set(CASES) == set(STARTERS) == set(REAL)
    for name, (family, _) in STARTERS.items():
        info = read_kernel(starter_path(name))
        assert family in FAMILIES
        assert info.backend == "triton" and info.shapes == "any" and info.space and info.docstring


@pytest.mark.beside(lambda: own_worker("interpret", interpreter=True))
def test_starters_in_the_interpreter():
    pytest.importorskip("triton")
    results = own_worker("interpret", interpreter=True).result()
    assert len(results) == sum(len(c) * (2 if n in DOTS else 3) for n, c in CASES.items())
    assert {name: problem for name, problem in results.items() if problem not in ("", "skipped")} == {}


@pytest.mark.beside(lambda: own_worker("compile", "float16", interpreter=False))
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.slow)])
def test_starters_for_hopper(dtype):
    pytest.importorskip("triton")
    facts = own_worker("compile", dtype, interpreter=False).result()
    assert set(facts) == set(REAL)
    for name, kernels in facts.items():
        assert kernels and all(k["spills"] == 0 and k["shared"] <= 227 * 1024 for k in kernels), (
            name,
            kernels,
        )
    assert dtype == "float32" or all(facts[name][0]["wgmma"] for name in DOTS)


# ---- starter_for ----


def task_for(gm, device: str, family: str = "other"):
    from autokernel.records import Port, Task

    ports = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            e = node.meta["example_value"]
            ports.append(
                Port(node.name, tuple(e.shape), str(e.dtype).removeprefix("torch."), tuple(e.stride()))
            )
    return Task(1, family, "0" * 64, device, 1, [], ports, [])


@pytest.mark.parametrize(
    "name", ["layer_norm", "rms_norm", "softmax", "gated_activation", "rope_complex", "matmul"]
)
def test_starter_for_a_cpu_region(name, tmp_path):
    from autokernel.backends import load_kernel
    from autokernel.playbook.starters import starter_for

    fn, make = CASES[name][0]
    args = make(lambda *shape: torch.randn(*shape))
    gm, ordered = captured(fn, args)
    source = starter_for(task_for(gm, "cpu"), gm)
    assert source is not None
    kernel = load_kernel(written(source, tmp_path, name))
    # a bare library call has nothing to generate; everything else is C++ where there is a compiler
    assert kernel.backend == ("cpp" if has_compiler() and name != "matmul" else "torch")
    assert error(fn, args, kernel.fn(*ordered), torch.float32) == ""


def test_without_a_compiler_the_region_is_torch_code(tmp_path, monkeypatch):
    from autokernel.backends import cpp_backend, load_kernel
    from autokernel.playbook.starters import starter_for

    monkeypatch.setattr(cpp_backend, "compiler", lambda: None)
    fn, make = CASES["rms_norm"][0]
    args = make(lambda *shape: torch.randn(*shape))
    gm, ordered = captured(fn, args)
    source = starter_for(task_for(gm, "cpu"), gm)
    assert source is not None
    kernel = load_kernel(written(source, tmp_path, "k"))
    assert kernel.backend == "torch"
    assert error(fn, args, kernel.fn(*ordered), torch.float32) == ""


def test_starter_for_a_gpu_region_is_triton():
    from autokernel.backends import read_kernel
    from autokernel.playbook.starters import starter_for

    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            gm, _ = captured(CASES[name][0][0], CASES[name][0][1](lambda *shape: torch.randn(*shape).half()))
            source = starter_for(task_for(gm, "cuda"), gm)
            assert source is not None, name
            info = read_kernel(written(source, Path(folder), name))
            assert info.backend == "triton", name


@pytest.mark.parametrize("model", ["nano", "gpt2", "llama"])
def test_whole_models_as_starters(model, tmp_path):
    """A shipped model with one block, written by `starter_for` as one kernel file, keeps its values."""
    import importlib.util

    from autokernel.backends import load_kernel
    from autokernel.playbook.starters import starter_for

    path = ROOT / "models" / f"{model}.py"
    spec = importlib.util.spec_from_file_location(f"starter_model_{model}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    config = module.Config()
    for field in ("layers", "n_layers", "depth"):
        if hasattr(config, field):
            setattr(config, field, 1)
    if hasattr(config, "context"):
        config.context = 64
    if hasattr(config, "length"):
        config.length = 48
    if hasattr(config, "vocab_size"):
        config.vocab_size = 500
    kind = next(getattr(module, n) for n in ("GPT2", "Llama", "Nano") if hasattr(module, n))
    torch.manual_seed(0)
    net = kind(config).eval()
    inputs = module.example_inputs(net)
    found = []

    def backend(gm, example):
        found.append((gm, example))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        expected = net(*inputs)
        torch.compile(net, backend=backend, dynamic=False)(*inputs)
        (gm, real) = found[0]
        source = starter_for(task_for(gm, "cpu"), gm)
        assert source is not None
        result = load_kernel(written(source, tmp_path, model)).fn(*real)
    torch.testing.assert_close(result[0], expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    print(json.dumps(interpret() if sys.argv[1] == "interpret" else cross_compile(sys.argv[2])))
