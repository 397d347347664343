"""Clocks, power and throttling while something is timed, in words; on a GPU in test_judge_gpu."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from autokernel.judge import clock, conditions
from autokernel.judge.conditions import Reading, Watch, describe

GPU = torch.device("cuda", 0)


def test_ranges_and_what_held_the_clocks_down() -> None:
    readings = [Reading(1980, 3201, 310.4, 41, 0), Reading(1755, 3201, 699.6, 52, 0x04 | 0x01)]
    assert describe(readings) == (
        "SM clock 1755 to 1980 MHz, memory 3201 MHz, 310 to 700 W, 41 to 52 °C, "
        "clocks held down by the power cap in 1 of 2 readings"
    )


def test_an_idle_gpu_is_not_held_down() -> None:
    assert describe([Reading(210, 2619, 70.0, 30, 0x01)]) == "SM clock 210 MHz, memory 2619 MHz, 70 W, 30 °C"


def test_what_a_gpu_does_not_tell_is_left_out() -> None:
    assert describe([]) == "" == describe([Reading()])
    assert describe([Reading(sm_mhz=1000)]) == "SM clock 1000 MHz"


class Card:
    """A stand-in for NVML: a driver that has the old name for what limits the clocks, and tells no power."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, works: bool = True) -> None:
        self.works, self.asked, self.reads = works, list[str](), 0

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return "card"

    def nvmlDeviceGetClockInfo(self, handle: str, which: int) -> int:
        self.reads += which == self.NVML_CLOCK_SM
        return {1: 1500, 2: 3000}[which]

    def nvmlDeviceGetTemperature(self, handle: str, which: int) -> int:
        return 40

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x20


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Card:
    found = Card(getattr(request, "param", True))
    monkeypatch.setitem(sys.modules, "pynvml", found)  # type: ignore[arg-type]
    properties = types.SimpleNamespace(uuid="1234-abcd")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    conditions._handle.cache_clear()
    request.addfinalizer(conditions._handle.cache_clear)
    return found


def test_a_reading_by_uuid_from_an_old_driver(card: Card) -> None:
    assert conditions.why_not(GPU) == ""
    assert conditions.read(GPU) == Reading(1500, 3000, None, 40, 0x20)
    assert card.asked == ["GPU-1234-abcd"]


@pytest.mark.parametrize("card", [False], indirect=True)
def test_without_nvml_nothing_is_read_and_the_reason_is_known(card: Card) -> None:
    assert conditions.why_not(GPU) == "NVML Shared Library Not Found"
    watch = Watch(GPU)
    watch.look()
    assert watch.readings == [] and card.reads == 0


def test_readings_are_taken_seldom(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(conditions.time, "monotonic", lambda: now[0])
    watch = Watch(GPU)
    for _ in range(10):
        watch.look()
        now[0] += 0.02
    assert len(watch.readings) == card.reads == 4  # at 0, 60, 120 and 180 ms


class Arm:
    name = "one"

    def sample(self, start: int) -> clock.Sample:
        return clock.Sample(1e-3, 2e-3, 1)


def test_rounds_on_a_cpu_have_no_readings() -> None:
    assert clock.interleave([Arm()], 3).readings == []


def test_rounds_on_a_gpu_have_readings(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_before_sample", lambda device, pause_s: None)
    rounds: Any = clock.interleave([Arm()], 3, device=GPU)
    assert "clocks held down by temperature in 1 of 1 readings" in describe(rounds.readings)
