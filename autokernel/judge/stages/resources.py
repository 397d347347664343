"""What the kernel takes of the device, as Triton says. A label on the verdict, and never a fault."""

from __future__ import annotations

import torch

from autokernel.judge import resources
from autokernel.judge.handle import WorkerFault
from autokernel.judge.resources import Multiprocessor
from autokernel.judge.trial import SUBJECT, StageResult, Trial


def run(trial: Trial) -> StageResult:
    worker, _ = trial.running
    device = trial.task_judge.device
    if device.type != "cuda":
        return StageResult(True, "only a GPU's are counted")
    try:
        kernels = resources.parse(worker.resources(SUBJECT))
    except WorkerFault as fault:
        return StageResult(True, f"unknown: {fault.reason.splitlines()[0]}")
    if not kernels:
        return StageResult(True, "no Triton kernel of its own was compiled")
    trial.spills = resources.spilling(kernels)
    return StageResult(True, resources.describe(kernels, multiprocessor(device)))


def multiprocessor(device: torch.device) -> Multiprocessor:
    found = torch.cuda.get_device_properties(device)
    return Multiprocessor(
        found.regs_per_multiprocessor,
        found.shared_memory_per_multiprocessor,
        found.max_threads_per_multi_processor,
    )
