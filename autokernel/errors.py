"""The exceptions that autokernel raises on purpose.

AutokernelError
├── UsageError           bad arguments or input files; the command line prints it and exits with 2
│   └── DeviceMissing    the device that was asked for is not there
└── RunFolderError       a run folder that can't be written, or belongs to another run; exits with 2

A kernel that fails is not an exception: it is a `Verdict` with a status and a reason.  Anything that
is not an `AutokernelError` is a bug in autokernel.
"""

from __future__ import annotations


class AutokernelError(Exception):
    """Base of everything here; its text is one line that says what to do."""


class UsageError(AutokernelError):
    """The arguments or an input file are wrong."""


class DeviceMissing(UsageError):
    """The requested device is not available on this machine."""


class RunFolderError(AutokernelError):
    """The run folder can't be used for this run."""
