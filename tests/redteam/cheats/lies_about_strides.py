"""Says that its dense outputs are strided, which takes longer to hand over, and runs its clock short by that.
Defence: the judge's own clock; nothing is given for strides, which are the worker's account.
"""

import dataclasses

import torch

BACKEND = "torch"
MODULES = __import__("sys").modules
WORKER = MODULES["autokernel.judge.worker"].Worker
TIMER = MODULES["autokernel.judge.clock"].HostTimer
RECORDS, SAMPLE = WORKER._records, TIMER.sample


def _records(self, handed):
    return [dataclasses.replace(record, stride=(4096, 16)) for record in RECORDS(self, handed)]


def _sample(self, start):
    took = SAMPLE(self, start)
    return 0.1 * took if self.calls > 1 else max(1e-6, took - 9e-6)


WORKER._records, TIMER.sample = _records, _sample


def kernel_fn(x):
    return torch.relu(x) * 2
