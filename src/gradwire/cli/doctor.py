"""`gradwire doctor`: checks what gradwire needs from this machine and this Python.

Each check is a function that returns findings. Those that judge numbers take them as arguments, so that they can be tested;
`_CHECKS` has them in the order in which they are shown.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from gradwire.cli.console import make_console, say
from gradwire.cluster.status_socket import check_place
from gradwire.versions import GRADWIRE_VERSION

Level = Literal["ok", "warn", "fail"]

_STYLES: dict[Level, str] = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}
_MIB, _GIB = 1 << 20, 1 << 30
_FEW_FILES = 4096
_FILES_PER_WORKER = 16  # of the driver: connections, pipes, lifeline, with a reserve
_FEW_TASKS = 1024
_SMALL_SHM = 256 * _MIB  # containers get 64 MiB by default
_SMALL_MEMORY = 2 * _GIB
_FEW_PORTS = 4096
_MAX_TEMP_CHARS = 40  # as long as the path of a socket in a cluster's folder fits
_TIME_ERROR = 5  # what adjtimex returns where nothing keeps the clock right
_EARLIEST_YEAR = 2025
_SLOW_CALL_US = 1000.0
_SELF_TEST_S = 120.0
_NEEDED = {"torch": (2, 8), "msgspec": (0, 19), "cloudpickle": (3, 0), "numpy": (1, 26), "cryptography": (43, 0)}
_OPTIONAL = {  # packages, and what installs them
    "ray": "gradwire[ray]",
    "submitit": "gradwire[slurm]",
    "starlette": "gradwire[dashboard]",
    "perfetto": "gradwire[trace]",
    "prometheus-client": "gradwire[metrics]",
    "opentelemetry-api": "gradwire[otel]",
    "safetensors": "safetensors",
}


class Finding(msgspec.Struct, frozen=True):
    """Result of one check.

    Attributes:
        section: Section of the report.
        name: What was checked.
        level: ``ok``, ``warn`` (gradwire works, with a drawback) or ``fail``.
        detail: The finding.
        next_step: What to do; empty if there is nothing to do.
    """

    section: str
    name: str
    level: Level
    detail: str
    next_step: str = ""


Check = Callable[[], Iterator[Finding]]


def show_findings(*, as_json: bool, with_self_test: bool) -> int:
    """Run all checks, printing each result as it becomes available; return the exit code."""
    findings = []
    section = ""
    for finding in run_checks(with_self_test=with_self_test):
        findings.append(finding)
        if not as_json:
            if finding.section != section:
                section = finding.section
                say(f"{section}", "bold")
            _show(finding)
    num_failed = sum(finding.level == "fail" for finding in findings)
    num_warnings = sum(finding.level == "warn" for finding in findings)
    if as_json:
        report = {"passed": num_failed == 0, "findings": findings}
        say(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        say(summarize(len(findings), num_failed, num_warnings), "bold red" if num_failed else "bold")
    return 1 if num_failed else 0


def summarize(num_findings: int, num_failed: int, num_warnings: int) -> str:
    """Return the last line."""
    parts = [f"{num_findings} checks"]
    parts += [f"{num_failed} failed"] if num_failed else []
    parts += [f"{num_warnings} warning{'s' if num_warnings > 1 else ''}"] if num_warnings else []
    return f"{', '.join(parts)}: gradwire {'does not work here' if num_failed else 'works here'}."


def run_checks(*, with_self_test: bool) -> Iterator[Finding]:
    """Run all checks, one after the other."""
    for check in _CHECKS:
        try:
            yield from check()
        except Exception as error:  # a system that is unusual in a way no check expects
            yield Finding("Other", check.__name__.strip("_"), "warn", f"could not be checked: {error!r}")
    if with_self_test:
        yield from _self_test()


def _show(finding: Finding) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_column(width=4)
    line.add_column(width=18)
    line.add_column()
    text = Text(finding.detail)
    if finding.next_step:
        text.append(f"\n{finding.next_step}", style="italic")
    line.add_row(Text(finding.level, _STYLES[finding.level]), finding.name, text)
    make_console().print(Padding(line, (0, 0, 0, 2), expand=False))


# The kernel


def _kernel() -> Iterator[Finding]:
    is_linux = sys.platform.startswith("linux")
    step = "" if is_linux else "run gradwire on Linux (a container or WSL 2 works)"
    yield Finding("Kernel", "system", "ok" if is_linux else "fail", f"{platform.system()} {platform.release()}", step)
    for name, what, step, probe in _FEATURES:
        try:
            probe()
        except (OSError, AttributeError) as error:
            yield Finding("Kernel", name, "fail", f"{what}: {error}", step)
        else:
            yield Finding("Kernel", name, "ok", what)


def _probe_memfd() -> None:
    fd = os.memfd_create("gradwire-doctor", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    finally:
        os.close(fd)


def _probe_epoll() -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        with select.epoll() as epoll:
            epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
            os.eventfd_write(fd, 1)
            if not epoll.poll(1.0):
                raise OSError(errno.EIO, "an eventfd did not wake epoll")
    finally:
        os.close(fd)


def _probe_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _probe_passing() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there, open(os.devnull, "rb") as file:
        socket.send_fds(here, [b"?"], [file.fileno()])
        _, fds, _, _ = socket.recv_fds(there, 1, 1)
        for fd in fds:
            os.close(fd)
        if len(fds) != 1:
            raise OSError(errno.EIO, "a descriptor did not arrive")
        there.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)


def _probe_death_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(2, ctypes.byref(ctypes.c_int()), 0, 0, 0) != 0:  # PR_GET_PDEATHSIG
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _probe_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.settimeout(2.0)
        client.connect(server.getsockname())
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
            client.setsockopt(socket.IPPROTO_TCP, option, 1)
        client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)


_SECCOMP = "a seccomp filter may block it: start the container with the default profile, or without one"
_FEATURES: list[tuple[str, str, str, Callable[[], None]]] = [
    ("memfd", "sealed memory files, for large tensors between processes", _SECCOMP, _probe_memfd),
    ("epoll, eventfd", "waiting for many connections", _SECCOMP, _probe_epoll),
    ("pidfd", "the end of a process is noticed at once", "use Linux 5.3 or newer; " + _SECCOMP, _probe_pidfd),
    ("Unix sockets", "descriptors and credentials pass between processes", _SECCOMP, _probe_passing),
    ("parent death", "workers end with the process that started them", _SECCOMP, _probe_death_signal),
    ("TCP", "loopback, keepalive and TCP_INFO: dead machines are noticed", "bring the lo interface up", _probe_tcp),
]


# Limits


def _limits() -> Iterator[Finding]:
    yield judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield judge_tasks(_task_limits())
    affinity = len(os.sched_getaffinity(0))
    yield judge_processors(os.cpu_count() or affinity, affinity, _cpu_quota(), os.environ.get("OMP_NUM_THREADS"))
    yield judge_memory(_memory_limit(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        yield judge_shm(shutil.disk_usage("/dev/shm").total, os.access("/dev/shm", os.W_OK))
    except OSError as error:
        yield Finding("Limits", "/dev/shm", "warn", f"{error.strerror}", _SHM_STEP)


def judge_open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        text = "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,}"
        return Finding("Limits", "open files", "ok", text)
    enough = soft // _FILES_PER_WORKER
    target = hard if hard != resource.RLIM_INFINITY and hard < 65_536 else 65_536
    step = f"for more: ulimit -n {target}" if target > soft else "ask the administrator for a higher hard limit"
    return Finding("Limits", "open files", "warn", f"up to {soft:,}, enough for about {enough} workers", step)


def judge_tasks(limits: dict[str, int]) -> Finding:
    """Judge the limits on processes and threads; `limits` has them by source."""
    if not limits:
        return Finding("Limits", "threads", "ok", "no limit")
    source, smallest = min(limits.items(), key=lambda item: item[1])
    if smallest >= _FEW_TASKS:
        return Finding("Limits", "threads", "ok", f"up to {smallest:,} processes and threads ({source})")
    text = f"up to {smallest:,} processes and threads ({source}); a worker has about 10"
    return Finding("Limits", "threads", "warn", text, "raise it: --pids-limit of the container, or ulimit -u")


def judge_processors(cores: int, affinity: int, quota: float | None, num_threads: str | None) -> Finding:
    """Judge how many processors this process may use, by affinity and by the quota of its control group."""
    usable = affinity if quota is None else min(float(affinity), quota)
    text = f"{affinity} of {cores}" + (f", limited to {quota:g} by a cgroup quota" if quota is not None else "")
    if quota is not None and quota < affinity and not num_threads:
        step = f"export OMP_NUM_THREADS={max(1, int(quota))}: otherwise torch starts {affinity} threads per process"
        return Finding("Limits", "processors", "warn", text, step)
    if usable < 2:
        return Finding("Limits", "processors", "warn", f"{text}: processes take turns", "expect longer calls")
    return Finding("Limits", "processors", "ok", text)


def judge_memory(limit: int | None, physical: int) -> Finding:
    available = physical if limit is None else min(limit, physical)
    text = f"{available / _GIB:.1f} GiB" + (" (cgroup limit)" if limit is not None and limit < physical else "")
    if available >= _SMALL_MEMORY:
        return Finding("Limits", "memory", "ok", text)
    return Finding("Limits", "memory", "warn", f"{text}; torch takes about 0.2 GiB", "give the container more memory")


_SHM_STEP = "gradwire does not use it, but DataLoader workers do: docker run --shm-size=1g"


def judge_shm(total: int, is_writable: bool) -> Finding:
    if not is_writable:
        return Finding("Limits", "/dev/shm", "warn", "not writable", _SHM_STEP)
    level: Level = "ok" if total >= _SMALL_SHM else "warn"
    return Finding("Limits", "/dev/shm", level, f"{total / _MIB:,.0f} MiB", "" if level == "ok" else _SHM_STEP)


def _task_limits() -> dict[str, int]:
    found = {"threads-max": _read_number(Path("/proc/sys/kernel/threads-max"))}
    if os.geteuid() != 0:  # the limit does not hold for root
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        found["ulimit -u"] = None if soft == resource.RLIM_INFINITY else soft
    for folder in _cgroups("pids"):
        found["cgroup"] = _smallest(found.get("cgroup"), _read_number(folder / "pids.max"))
    return {source: limit for source, limit in found.items() if limit is not None}


def _cpu_quota() -> float | None:
    """Return how many processors' time the control group may use, or None for no limit."""
    found: float | None = None
    for folder in _cgroups("cpu"):
        quota = period = None
        with contextlib.suppress(OSError, ValueError):
            first, _, second = (folder / "cpu.max").read_text().partition(" ")
            quota, period = int(first), int(second)
        if quota is None:  # the first version of control groups; -1 is no limit
            quota = _read_number(folder / "cpu.cfs_quota_us")
            period = _read_number(folder / "cpu.cfs_period_us")
        if quota and period and quota > 0:
            found = quota / period if found is None else min(found, quota / period)
    return found


def _memory_limit() -> int | None:
    found = None
    for folder in _cgroups("memory"):
        found = _smallest(found, _read_number(folder / "memory.max"))
        found = _smallest(found, _read_number(folder / "memory.limit_in_bytes"))
    return found


def _cgroups(controller: str) -> list[Path]:
    """Return the folders of the control group of this process and its parents, in either version."""
    root = Path("/sys/fs/cgroup")
    folders: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                base = root
            elif controller in controllers.split(","):
                base = root / controllers
            else:
                continue
            group = base / path.lstrip("/")
            folders += [group, *(parent for parent in group.parents if parent.is_relative_to(base))]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # ValueError: "max"
        return None


def _smallest(one: int | None, other: int | None) -> int | None:
    return min((value for value in (one, other) if value is not None), default=None)


# Files and network


def _places() -> Iterator[Finding]:
    folder = tempfile.gettempdir()
    if len(folder) > _MAX_TEMP_CHARS:
        text = f"{folder} is too long for socket paths; /tmp is used instead"
        yield Finding("Files and network", "temporary files", "ok" if os.access("/tmp", os.W_OK) else "fail", text)
    else:
        is_writable = os.access(folder, os.W_OK)
        step = "" if is_writable else "set TMPDIR to a writable folder"
        yield Finding("Files and network", "temporary files", "ok" if is_writable else "fail", folder, step)
    try:
        place = check_place()
    except OSError as error:
        text = f"not available: {error.filename or ''}: {error.strerror}"
        yield Finding("Files and network", "gradwire status", "warn", text, "clusters work without it")
    else:
        yield Finding("Files and network", "gradwire status", "ok", f"sockets in {place}")


def _network() -> Iterator[Finding]:
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        first, last = 32_768, 60_999
    yield judge_ports(first, last)
    name = socket.gethostname()
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError as error:
        addresses = []
        yield Finding("Files and network", "host name", "warn", f"{name}: {error.strerror}", _NAME_STEP)
    if addresses:
        yield judge_host(name, addresses)


def judge_ports(first: int, last: int) -> Finding:
    num_ports = last - first + 1
    text = f"{first} to {last} are assigned by the kernel"
    if num_ports >= _FEW_PORTS:
        return Finding("Files and network", "ports", "ok", text)
    step = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
    return Finding("Files and network", "ports", "warn", f"{text}: only {num_ports}", step)


_NAME_STEP = "only for several machines: add it to DNS or /etc/hosts, or use addresses instead of names"


def judge_host(name: str, addresses: list[str]) -> Finding:
    text = f"{name} is {', '.join(addresses)}"
    if all(address.startswith("127.") for address in addresses):
        return Finding("Files and network", "host name", "warn", f"{text}: others cannot use it", _NAME_STEP)
    return Finding("Files and network", "host name", "ok", text)


# Software


def _software() -> Iterator[Finding]:
    yield judge_python(platform.python_version_tuple(), sys.executable)
    yield Finding("Software", "gradwire", "ok", GRADWIRE_VERSION)
    for package, needed in _NEEDED.items():
        yield judge_package(package, _version_of(package), needed)
    for package, extra in _OPTIONAL.items():
        version = _version_of(package)
        text = version or f"not installed (optional: pip install '{extra}')"
        yield Finding("Software", package, "ok", text)
    has_tls = ssl.HAS_TLSv1_3
    step = "" if has_tls else "use a Python with OpenSSL 1.1.1 or newer"
    yield Finding("Software", "TLS 1.3", "ok" if has_tls else "fail", ssl.OPENSSL_VERSION, step)


def judge_python(version: tuple[str, str, str], executable: str) -> Finding:
    is_new = (int(version[0]), int(version[1])) >= (3, 10)
    step = "" if is_new else "install Python 3.10 or newer"
    text = f"{'.'.join(version)} ({executable})"
    return Finding("Software", "Python", "ok" if is_new else "fail", text, step)


def judge_package(package: str, version: str | None, needed: tuple[int, int]) -> Finding:
    wanted = ".".join(map(str, needed))
    step = f"pip install '{package}>={wanted}'"
    if version is None:
        return Finding("Software", package, "fail", "not installed", step)
    numbers = [int(part) if part.isdecimal() else 0 for part in version.split(".")[:2]]
    if tuple(numbers) < needed:
        return Finding("Software", package, "fail", f"{version}; gradwire needs {wanted}", step)
    return Finding("Software", package, "ok", version)


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# This process


def _process() -> Iterator[Finding]:
    yield judge_interrupt(signal.getsignal(signal.SIGINT))
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(1024)) if hasattr(libc, "adjtimex") else 0
    yield judge_clock(time.time(), state)


def judge_interrupt(handler: object) -> Finding:
    if handler is signal.SIG_IGN:
        step = "start programs in the foreground, or stop them with kill -TERM"
        return Finding("This shell", "Ctrl-C", "warn", "is ignored: started in the background of a script?", step)
    return Finding("This shell", "Ctrl-C", "ok", "raises KeyboardInterrupt")


def judge_clock(now_s: float, state: int) -> Finding:
    """Judge the clock; `state` is what adjtimex returned."""
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if time.gmtime(now_s).tm_year < _EARLIEST_YEAR:
        step = "set the clock: certificates are not valid yet"
        return Finding("This shell", "clock", "fail", text, step)
    if state == _TIME_ERROR:
        step = "only for several machines: certificates need clocks within 10 minutes; run chrony or ntpd on the host"
        return Finding("This shell", "clock", "warn", f"{text}, not synchronized", step)
    return Finding("This shell", "clock", "ok", text)


# The self test


def _self_test() -> Iterator[Finding]:
    """Start a worker in a separate process, so that a crash or hang is reported as a finding."""
    command = [sys.executable, "-m", "gradwire.cli.self_test"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SELF_TEST_S, check=False)
    except subprocess.TimeoutExpired:
        step = f"run it manually for details: {' '.join(command)}"
        yield Finding("Self test", "two processes", "fail", f"did not finish within {_SELF_TEST_S:g} s", step)
        return
    try:
        measured = json.loads(done.stdout.splitlines()[-1])
        yield from judge_self_test(measured["start_s"], measured["call_us"], measured["is_equal"], measured["error"])
    except (IndexError, KeyError, TypeError, ValueError):
        text = (done.stderr.strip() or done.stdout.strip() or f"exited with code {done.returncode}").splitlines()[-1]
        yield Finding("Self test", "two processes", "fail", text, f"run it manually for details: {' '.join(command)}")


def judge_self_test(start_s: float, call_us: float, is_equal: bool, error: float) -> Iterator[Finding]:
    """Judge the measurements of `gradwire.cli.self_test`."""
    yield Finding("Self test", "start", "ok", f"a worker answered after {start_s:.1f} s (importing torch)")
    level: Level = "ok" if call_us < _SLOW_CALL_US else "warn"
    step = "" if level == "ok" else "the machine is busy, or its processors are shared: try again when it is idle"
    yield Finding("Self test", "call", level, f"{call_us:.0f} us round trip (median of 1,000)", step)
    if is_equal:
        yield Finding("Self test", "gradient", "ok", "across two processes, bit-identical to one process")
    else:
        step = "please report this with the output of `gradwire doctor --json`"
        yield Finding("Self test", "gradient", "fail", f"differs from that of one process by {error:.1e}", step)


_CHECKS: tuple[Check, ...] = (_kernel, _limits, _places, _network, _software, _process)
