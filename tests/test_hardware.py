"""Devices, measured ceilings and their cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autokernel import hardware
from autokernel.errors import DeviceMissing, UsageError
from autokernel.torch_flags import tf32


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems: what is tested is the measuring, not the machine."""
    sizes = {"cpu": {"float32": 128, "float64": 96}, "cuda": {"float32": 512, "tf32": 512, "float16": 512}}
    monkeypatch.setattr(hardware, "_MATMUL_SIZES", sizes)
    monkeypatch.setattr(hardware, "_COPY_BYTES", {"cpu": 1 << 20, "cuda": 1 << 24})


def test_detect_the_cpu() -> None:
    device = hardware.detect("cpu")
    assert device.kind == "cpu" and device.torch_name == "cpu" and device.name
    assert device.units == torch.get_num_threads()
    assert hardware.Device(**json.loads(json.dumps(device.to_json()))) == device


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0", "mps", "", "cuda:-1"])
def test_no_such_kind_of_device(name: str) -> None:
    with pytest.raises(UsageError, match="cpu, cuda or cuda:N"):
        hardware.detect(name)


def test_device_that_is_not_there() -> None:
    with pytest.raises(DeviceMissing, match="--device"):
        hardware.detect("cuda:99")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_is_busy", lambda device: False)


def test_what_is_measured_on_a_busy_machine_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = hardware.detect("cpu")
    rates = iter([1.0, 5.0])
    monkeypatch.setattr(hardware, "_measure", lambda d: hardware.Ceilings(next(rates), {"float32": 2.0}))
    monkeypatch.setattr(hardware, "_is_busy", lambda d: True)
    assert hardware.ceilings(device, cache=tmp_path).copy_bytes_per_s == 1.0
    monkeypatch.setattr(hardware, "_is_busy", lambda d: False)
    assert hardware.ceilings(device, cache=tmp_path).copy_bytes_per_s == 5.0
    assert hardware.ceilings(device, cache=tmp_path).from_cache


def test_ceilings_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = hardware.detect("cpu")
    first = hardware.ceilings(device, cache=tmp_path)
    assert not first.from_cache
    assert first.copy_bytes_per_s is not None and first.copy_bytes_per_s > 1e8
    assert set(first.flops_per_s) == {"float32", "float64"}
    assert all(rate > 1e7 for rate in first.flops_per_s.values())
    assert first.launch_us is not None and 0 < first.launch_us < 1000

    def fail(_: hardware.Device) -> hardware.Ceilings:
        raise AssertionError("measured again")

    monkeypatch.setattr(hardware, "_measure", fail)
    second = hardware.ceilings(device, cache=tmp_path)
    assert second.from_cache
    assert second.flops_per_s == first.flops_per_s and second.copy_bytes_per_s == first.copy_bytes_per_s


def test_another_thread_count_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = hardware.detect("cpu")
    measured = []
    fake = hardware.Ceilings(1.0, {"float32": 2.0})
    monkeypatch.setattr(hardware, "_measure", lambda d: measured.append(d) or fake)
    threads = torch.get_num_threads()
    hardware.ceilings(device, cache=tmp_path)
    try:
        torch.set_num_threads(threads + 1)
        hardware.ceilings(device, cache=tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert len(measured) == 2
    hardware.ceilings(device, cache=tmp_path)
    assert len(measured) == 2
    hardware.ceilings(device, cache=tmp_path, fresh=True)
    assert len(measured) == 3


def test_a_torn_cache_is_measured_again(tmp_path: Path) -> None:
    device = hardware.detect("cpu")
    hardware.ceilings(device, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:40])
    assert not hardware.ceilings(device, cache=tmp_path).from_cache


def test_a_cache_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert hardware.ceilings(hardware.detect("cpu"), cache=blocked / "below").copy_bytes_per_s


def test_what_cannot_be_measured_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_MATMUL_SIZES", {"cpu": {"float32": 64, "bits16": 64}})
    with pytest.warns(UserWarning, match="no bits16 ceiling, so no percentage"):
        found = hardware.ceilings(hardware.detect("cpu"), cache=tmp_path)
    assert set(found.flops_per_s) == {"float32"}


def test_measuring_leaves_the_precision_flags_alone(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert tf32().products
        hardware.ceilings(hardware.detect("cpu"), cache=tmp_path)
        assert torch.get_float32_matmul_precision() == "high"
        torch.set_float32_matmul_precision("highest")
        assert not tf32().products
    finally:
        torch.set_float32_matmul_precision(before)


def test_versions_fit_into_json() -> None:
    found = hardware.versions()
    assert found["torch"] == torch.__version__
    assert {"python", "triton", "cuda", "driver", "compiler", "system"} <= set(found)
    json.dumps(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_detect_and_measure_a_gpu(tmp_path: Path) -> None:
    device = hardware.detect("cuda")
    assert device.kind == "cuda" and device.arch.startswith("sm_")
    assert device.units and device.l2_bytes and device.driver
    found = hardware.ceilings(device, cache=tmp_path)
    assert found.copy_bytes_per_s and set(found.flops_per_s) == {"float32", "tf32", "float16"}
