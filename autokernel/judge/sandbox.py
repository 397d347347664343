"""What an untrusted worker is locked into, and which of these guards this system has.

    namespaces   of its own for users, processes, mounts, network and System V IPC
    files        everything read-only; the home folder empty but for Python and this package; private, bounded
                 /tmp, /dev/shm and scratch folder
    /proc        its own: no other process can be seen, signalled or read; system settings are read-only
    privileges   no capability, no way to gain one, no system call that mounts, traces or opens a socket
    limits       processes, memory, size of a file; first to go when memory runs out

`probe` tries each guard once in a throw-away process; `enter` applies those that work, and a worker in which
one then fails does not start.  What is not covered: the kernel and the GPU's driver are shared, and files
that everyone may read stay readable (there is no network to send them to).

Runs as a script, too (``python sandbox.py`` prints what works), so it imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

GUARDS = {
    "shared memory": "cannot reach other processes' System V shared memory (IPC namespace)",
    "processes": "cannot see, signal or trace other processes (PID namespace, own /proc)",
    "files": "cannot write outside its scratch folder (read-only mounts)",
    "home": "cannot read the home folder",
    "network": "no network (namespace)",
    "capabilities": "no privileges (capabilities dropped, no new privileges)",
    "system calls": "no mount, trace or socket calls (seccomp)",
    "process limit": "cannot fill the process table",
    "memory limit": "cannot fill the memory",
    "disk limit": "cannot fill the disk",
}
"""Guard -> what it means for a candidate, as `autokernel doctor` says it."""

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUTS = 0x0002_0000, 0x0800_0000, 0x0400_0000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
AT_RECURSIVE, MOUNT_ATTR_RDONLY, SYS_MOUNT_SETATTR = 0x8000, 1, 442
PR_SET_DUMPABLE = 4
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

MAX_PROCESSES = 256
MAX_FILE_BYTES = 2 << 30
MEMORY_SHARE = 0.75
"""Of the machine's memory, for one worker."""

_libc = ctypes.CDLL(None, use_errno=True)


class SandboxError(OSError):
    """A guard that works on this system could not be applied to a worker."""


# -- from outside: what works here -------------------------------------------------------------------


def probe() -> dict[str, str]:
    """Guard -> ``""`` if it works on this system, else why not."""
    if not sys.platform.startswith("linux"):
        return dict.fromkeys(GUARDS, f"not on {platform.system()}")
    run = subprocess.run(
        [sys.executable, "-I", "-S", __file__], capture_output=True, text=True, timeout=60, check=False
    )
    try:
        found = json.loads(run.stdout)
    except ValueError:
        reason = (run.stderr.strip().splitlines() or ["the probe ended without an answer"])[-1]
        return dict.fromkeys(GUARDS, reason)
    return {guard: found.get(guard, "not tried") for guard in GUARDS}


def control_groups(name: str) -> list[str]:
    """Control groups of this name that limit processes and memory; empty if we may not make any."""
    limits = {"pids.max": str(MAX_PROCESSES), "memory.max": str(int(MEMORY_SHARE * _memory_bytes()))}
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        controllers = root / "cgroup.subtree_control"
        with contextlib.suppress(OSError):
            if "pids" not in controllers.read_text().split():
                controllers.write_text("+pids +memory")
        parents = {root: tuple(limits)}
    else:  # the older hierarchy has a tree per controller
        parents = {root / "pids": ("pids.max",), root / "memory": ("memory.limit_in_bytes",)}
        limits["memory.limit_in_bytes"] = limits["memory.max"]
    made: list[str] = []
    for parent, names in parents.items():
        folder = parent / name
        try:
            folder.mkdir()
            made.append(str(folder))
            for limit in names:
                (folder / limit).write_text(limits[limit])
        except OSError:
            drop_control_groups(made)
            return []
    return made


def drop_stale_control_groups() -> None:
    """Those of judges that were killed: their names hold the judge's process number."""
    for folder in Path("/sys/fs/cgroup").glob("**/autokernel-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            drop_control_groups([str(folder)])


def drop_control_groups(folders: Sequence[str]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def needed_folders() -> list[str]:
    """What a worker has to read even if it lies in the home folder: Python, its packages, ourselves."""
    found = [sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2]), *sys.path]
    found += [os.path.realpath(sys.executable)]
    return [f for f in dict.fromkeys(found) if f and os.path.exists(f)]


# -- inside: in a freshly forked, single-threaded process ----------------------------------------------


class _Try:
    """Applies guards; in a probe it notes what fails, in a worker that is the end."""

    def __init__(self, wanted: Sequence[str], *, probing: bool) -> None:
        self.wanted, self.probing = set(wanted), probing
        self.failed: dict[str, str] = {}

    def __call__(self, guard: str, step: Callable[[], Any]) -> None:
        if guard not in self.wanted or guard in self.failed:
            return
        try:
            step()
        except OSError as error:
            if not self.probing:
                raise SandboxError(error.errno or 0, f"{guard}: {error.strerror or error}") from error
            self.failed[guard] = error.strerror or str(error)


def enter(spec: dict[str, Any]) -> None:
    """Lock this process in; returns in a grandchild, while this process waits for it and ends as it did.

    ``spec``: ``guards`` (names), ``scratch`` (gets a file system of its own), ``shared`` (folders that stay
    writable), ``keep`` (what stays readable in the home folder), ``groups`` (control groups to join) and
    ``private_tmp``.  Raises SandboxError.
    """
    attempt = _Try(spec["guards"], probing=False)
    _namespaces(attempt, spec)
    _inside(attempt, spec)


def _namespaces(attempt: _Try, spec: dict[str, Any]) -> None:
    for group in spec["groups"]:
        attempt("process limit", lambda group=group: _write(f"{group}/cgroup.procs", str(os.getpid())))
    uid, gid = os.getuid(), os.getgid()

    def own_users() -> None:
        _unshare(CLONE_NEWUSER)
        with contextlib.suppress(OSError):
            _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")

    if uid != 0:
        attempt("processes", own_users)
    attempt("shared memory", lambda: _unshare(CLONE_NEWIPC))
    for guard in ("files", "processes"):  # either changes mounts, and never those of the system
        attempt(guard, lambda: _unshare(CLONE_NEWNS | CLONE_NEWUTS))
        attempt(guard, lambda: _mount(None, "/", None, MS_REC | MS_PRIVATE))
    attempt("network", lambda: _unshare(CLONE_NEWNET))
    if "processes" in attempt.wanted and "processes" not in attempt.failed:
        attempt("processes", lambda: _unshare(CLONE_NEWPID))
        if "processes" not in attempt.failed:
            _become_inner()


def _become_inner() -> None:
    """Fork twice: an init that reaps, and in it the worker, with ordinary signals. This process waits."""
    status_r, status_w = os.pipe()
    init = os.fork()
    if init:
        _wait_for(init, status_r)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    inner = os.fork()
    if inner == 0:
        os.close(status_r)
        os.close(status_w)
        return
    _close_all_but(status_w)
    _prctl(PR_SET_DUMPABLE, 0)  # its memory is not the worker's to write
    while True:  # process 1 of the namespace: when it ends, all that is left in there is killed
        pid, status = os.wait()
        if pid == inner:
            os.write(status_w, struct.pack("<i", status))
            os._exit(0)


def _wait_for(init: int, status_r: int) -> NoReturn:
    _close_all_but(status_r)
    os.waitpid(init, 0)
    data = os.read(status_r, 4) if _readable(status_r) else b""
    status = struct.unpack("<i", data)[0] if len(data) == 4 else signal.SIGKILL
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _readable(fd: int) -> bool:
    import select

    return bool(select.select([fd], [], [], 0)[0])


def _close_all_but(keep: int) -> None:
    os.closerange(0, keep)
    os.closerange(keep + 1, 4096)


def _inside(attempt: _Try, spec: dict[str, Any]) -> None:
    """Mounts, limits, privileges; the mounts first, since they need what is dropped last."""
    with contextlib.suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")
    attempt("processes", _own_proc)
    own_proc = "processes" in attempt.wanted and "processes" not in attempt.failed
    if "files" in attempt.wanted and "files" not in attempt.failed:
        _own_files(attempt, spec, own_proc=own_proc)
    limit = int(MEMORY_SHARE * _memory_bytes())
    attempt("memory limit", lambda: _limit(resource.RLIMIT_DATA, limit))
    attempt("disk limit", lambda: _limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES))
    if not spec["groups"]:
        attempt("process limit", _limit_processes)
    _limit(resource.RLIMIT_CORE, 0)
    attempt("capabilities", _drop_privileges)
    attempt("system calls", _filter_system_calls)


def _own_proc() -> None:
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in ("sys", "sysrq-trigger", "irq", "bus", "fs"):  # what is the whole system's
        if os.path.exists(f"/proc/{name}"):
            _bind(f"/proc/{name}", f"/proc/{name}")
            _mount_attributes(f"/proc/{name}", 0, MOUNT_ATTR_RDONLY, 0)


def _own_files(attempt: _Try, spec: dict[str, Any], *, own_proc: bool) -> None:
    scratch, here = spec["scratch"], os.getcwd()
    shared = {folder: os.open(folder, os.O_PATH) for folder in spec["shared"]}
    home = os.path.expanduser("~")
    if home not in ("/", "") and os.path.isdir(home) and "home" in attempt.wanted:
        attempt("home", lambda: _hide(home, [*needed_folders(), *spec["keep"]]))
        for folder in {os.getcwd(), str(Path(__file__).resolve().parents[2])}:
            for name in (".env", ".envrc", ".netrc"):
                path = os.path.join(folder, name)
                if os.path.isfile(path):
                    attempt("home", lambda path=path: _bind("/dev/null", path))

    def mounts() -> None:
        _own_devices()
        for folder in (scratch, *shared):  # those in the home folder, which is another one by now
            os.makedirs(folder, exist_ok=True)
        for folder in ("/run", "/var/run"):  # sockets of the system's services
            if os.path.isdir(folder) and not os.path.islink(folder):
                _tmpfs(folder, "size=64k,mode=755")
        if spec["private_tmp"]:
            _read_only("/")
            needed = [p for p in (*needed_folders(), *spec["keep"]) if os.path.realpath(p) != "/tmp"]
            _hide("/tmp", needed, f"size={MAX_FILE_BYTES},mode=1777")
            os.makedirs(scratch, exist_ok=True)
            _tmpfs(scratch, f"size={MAX_FILE_BYTES},mode=700")
        else:
            _tmpfs(scratch, f"size={MAX_FILE_BYTES},mode=700")
            layer = _layer_over("/tmp", scratch)
            _read_only("/")
            for folder in (scratch, *layer):
                _mount_attributes(folder, 0, 0, MOUNT_ATTR_RDONLY)
        if own_proc:  # CUDA does not start where a process can't write its own entries
            _mount_attributes("/proc", 0, 0, MOUNT_ATTR_RDONLY)
        if os.path.isdir("/dev/shm"):
            _tmpfs("/dev/shm", f"size={MAX_FILE_BYTES},mode=1777")
        for folder, fd in shared.items():
            os.makedirs(folder, exist_ok=True)
            _bind(f"/proc/self/fd/{fd}", folder)
            _mount_attributes(folder, 0, 0, MOUNT_ATTR_RDONLY)

    attempt("files", mounts)
    for fd in shared.values():
        os.close(fd)
    os.chdir(scratch if spec["private_tmp"] else here)


def _layer_over(folder: str, scratch: str) -> list[str]:
    """Let ``folder`` be read as it is, and written to in ``scratch``; the mounts that must stay writable.

    Where the system has no overlays, writes go through to ``folder``: the user's model has to run.
    """
    upper, work = os.path.join(scratch, ".upper"), os.path.join(scratch, ".work")
    os.mkdir(upper)
    os.mkdir(work)
    fd = os.open(scratch, os.O_PATH)
    try:
        _mount("overlay", folder, "overlay", 0, f"lowerdir={folder},upperdir={upper},workdir={work}")
    except OSError:
        _bind(folder, folder)
    if os.path.realpath(scratch).startswith(folder + os.sep):  # hidden by now: show it again
        _bind(f"/proc/self/fd/{fd}", scratch)
    os.close(fd)
    return [folder]


def _own_devices() -> None:
    """Only harmless devices and accelerators: a disk is a file that a read-only mount lets through."""
    kept = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    kept += [str(p) for pattern in ("nvidia*", "kfd", "dri") for p in Path("/dev").glob(pattern)]
    fds = {path: os.open(path, os.O_PATH) for path in kept if os.path.exists(path)}
    folders = {path for path in fds if os.path.isdir(path)}
    _mount("tmpfs", "/dev", "tmpfs", MS_NOSUID, "size=64k,mode=755")
    for path, fd in fds.items():
        os.mkdir(path) if path in folders else Path(path).touch()
        _bind(f"/proc/self/fd/{fd}", path)
        os.close(fd)
    os.mkdir("/dev/shm")
    for name, target in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        os.symlink(f"/proc/self/{target}", f"/dev/{name}")


def _tmpfs(folder: str, options: str) -> None:
    _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, options)


def _hide(home: str, needed: Sequence[str], options: str = "size=1m,mode=755") -> None:
    """An empty folder over ``home``, with those of the needed ones that lie in it bound back."""
    home = os.path.realpath(home)
    real = {os.path.realpath(p) for p in needed if os.path.exists(p)}
    inside = sorted(p for p in real if p.startswith(home + os.sep))
    outermost = [p for p in inside if not any(p.startswith(q + os.sep) for q in inside)]
    if home in real:
        return  # the project is the home folder itself
    fds = [(path, os.open(path, os.O_PATH)) for path in outermost]
    _tmpfs(home, options)
    for path, fd in fds:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(path).touch()
        _bind(f"/proc/self/fd/{fd}", path)
        os.close(fd)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _limit_processes() -> None:
    if os.getuid() == 0:
        raise OSError(0, "root has no limit on processes, and no control group could be made")
    _limit(resource.RLIMIT_NPROC, MAX_PROCESSES)


def _drop_privileges() -> None:
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    with contextlib.suppress(OSError):
        _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for number in range(64):
        with contextlib.suppress(OSError):
            _prctl(PR_CAPBSET_DROP, number)
    header = struct.pack("<Ii", 0x2008_0522, 0)
    if _libc.capset(header, bytes(24)):
        raise _error()


# -- seccomp -----------------------------------------------------------------------------------------

DENIED = {
    "x86_64": (0xC000_003E, 56, 41, (
        101, 103, 109, 112, 155, 159, 161, 163, 164, 165, 166, 167, 168, 169, 175, 176, 179, 227, 246, 248,
        249, 250, 272, 298, 304, 308, 310, 311, 312, 313, 320, 321, 323,
    )),
    "aarch64": (0xC000_00B7, 220, 198, (
        39, 40, 41, 51, 89, 97, 104, 105, 106, 112, 116, 117, 142, 154, 157, 170, 171, 217, 218, 219,
        224, 225, 241, 265, 268, 270, 271, 272, 273, 280, 282, 294,
    )),
}  # fmt: skip
"""Architecture -> audit number, clone, socket, and what is refused: tracing, other processes' memory, mounts,
namespaces, modules, keys, clocks, swap, bpf, performance counters, user faults; and leaving the process
group, which is stopped as a whole while others are timed (setpgid, setsid)."""
DENIED_EVERYWHERE = (425, 428, 429, 430, 431, 432, 433, 438, 440, 442)
X32_CALLS = 0x4000_0000
"""On x86_64 every call has a second number from here on, by which it would get past a list of the first ones;
elsewhere there are none so high."""
CLONE3, ENOSYS, EPERM, AF_UNIX = 435, 38, 1, 1


def _filter_system_calls() -> None:
    """A BPF program: refuse the calls above, sockets other than Unix ones, and new user namespaces."""
    if platform.machine() not in DENIED or sys.byteorder != "little":
        raise OSError(0, f"no list of system calls for {platform.machine()}")
    arch, clone, socket, denied = DENIED[platform.machine()]
    allow, deny = 0x7FFF_0000, 0x0005_0000
    load, equal, is_set, ret = 0x20, 0x15, 0x45, 0x06
    at_least = 0x35
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (ret, 0, 0, 0x8000_0000), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, X32_CALLS), (ret, 0, 0, deny | EPERM)]
    for number in (*denied, *DENIED_EVERYWHERE):
        program += [(equal, 0, 1, number), (ret, 0, 0, deny | EPERM)]
    program += [(equal, 0, 1, CLONE3), (ret, 0, 0, deny | ENOSYS)]  # libraries fall back to clone
    program += [(equal, 0, 4, socket), (load, 0, 0, 16), (equal, 1, 0, AF_UNIX), (ret, 0, 0, deny | EPERM),
                (ret, 0, 0, allow)]  # fmt: skip
    program += [
        (equal, 0, 3, clone),
        (load, 0, 0, 16),
        (is_set, 0, 1, CLONE_NEWUSER),
        (ret, 0, 0, deny | EPERM),
    ]
    program += [(ret, 0, 0, allow)]
    code = b"".join(struct.pack("<HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    fprog = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    if _libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(fprog), 0, 0):
        raise _error()


# -- system calls ------------------------------------------------------------------------------------


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise _error()


_own_mounts = False


def _unshare(flags: int) -> None:
    global _own_mounts
    if _libc.unshare(flags):
        raise _error()
    _own_mounts = _own_mounts or bool(flags & CLONE_NEWNS)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    def text(value: str | None) -> bytes | None:
        return None if value is None else os.fsencode(value)

    if not _own_mounts:
        raise OSError(0, f"mounting {target} without a mount namespace of one's own")
    if _libc.mount(text(source), text(target), text(kind), ctypes.c_ulong(flags), text(data)):
        error = _error()
        raise OSError(error.errno, f"mounting {target}: {error.strerror}")


def _bind(source: str, target: str) -> None:
    _mount(source, target, None, MS_BIND | MS_REC)


def _mount_attributes(path: str, flags: int, add: int, remove: int) -> None:
    attributes = struct.pack("<QQQQ", add, remove, 0, 0)
    if _libc.syscall(SYS_MOUNT_SETATTR, -100, os.fsencode(path), flags, attributes, len(attributes)):
        error = _error()
        raise OSError(error.errno, f"making {path} read-only: {error.strerror}")


def _read_only(path: str) -> None:
    _mount_attributes(path, AT_RECURSIVE, MOUNT_ATTR_RDONLY, 0)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _main() -> None:
    """Try everything in a process of its own, and print what failed as JSON."""
    import tempfile

    scratch = tempfile.mkdtemp()
    groups = control_groups(f"autokernel-probe-{os.getpid()}")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 3, inheritable=False) if write != 3 else None
        attempt = _Try(list(GUARDS), probing=True)
        spec = {"scratch": scratch, "shared": [], "keep": [], "private_tmp": True, "groups": groups}
        _namespaces(attempt, spec)
        _inside(attempt, spec)
        os.write(3, json.dumps({g: attempt.failed.get(g, "") for g in GUARDS}).encode())
        os._exit(0)
    os.close(write)
    found = b""
    while chunk := os.read(read, 65_536):
        found += chunk
    os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        os.rmdir(scratch)
    drop_control_groups(groups)
    print(found.decode())


if __name__ == "__main__":
    _main()
