"""Several hosts on one machine: real network stacks, host names, process tables and /dev/shm.

Each host is a set of Linux namespaces. The hosts are connected by a network bridge in one more
host, the hub. No link, address, process or mount of the hosts is visible on the machine itself, so
any number of test runs can run at the same time.

The first process of a host (its init) is a `cat` on a pipe that only the test process holds. The
kernel kills everything in a PID namespace when its init ends, so a host cannot outlive the test
process, even if the test raises an exception or its process is killed.
"""

import ctypes
import functools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_CLONE_NEWPID = 0x20000000  # <linux/sched.h>; the os module has it only from Python 3.12 on
_TOOLS = ("cat", "env", "hostname", "ip", "mount", "nsenter", "unshare")
_SETUP_S = 10.0  # one step of building or ending a host takes milliseconds
_GRACE_S = 3.0  # from SIGTERM to SIGKILL for a command that ran past its timeout
_libc = ctypes.CDLL(None, use_errno=True)


def _check(status: int, call: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


@contextmanager
def _children_in_pid_namespace_of(init: int | None) -> Iterator[None]:
    """Start processes inside the block in the PID namespace of `init`, or in a new one.

    A process enters a PID namespace when it is created. The namespace is set for the children of
    this thread. With `nsenter --pid`, the child would be a wrapper; here the started command is a
    direct child, so pid, signals and exit status are those of the command.
    """
    with open("/proc/self/ns/pid") as own:
        if init is None:
            _check(_libc.unshare(_CLONE_NEWPID), "unshare a PID namespace")
        else:
            with open(f"/proc/{init}/ns/pid") as other:
                _check(_libc.setns(other.fileno(), _CLONE_NEWPID), "enter a PID namespace")
        try:
            yield
        finally:
            _check(_libc.setns(own.fileno(), _CLONE_NEWPID), "return to the own PID namespace")


class Host:
    """A separate host for the processes on it. Only files are shared with the machine.

    Created by `network` or `two_hosts`. Commands run as root, in the caller's folder.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._started: list[subprocess.Popen[str]] = []
        # An init must reap orphans. With SIGCHLD ignored, the kernel does so.
        namespaces = ["unshare", "--net", "--mount", "--uts", "--ipc", "--propagation", "private"]
        with _children_in_pid_namespace_of(None):
            self._init = subprocess.Popen(
                [*namespaces, "--", "env", "--ignore-signal=CHLD", "cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

    def _boot(self, names: Path) -> None:
        """Wait for the namespaces, then set the host name and mount /sys and /dev/shm."""
        assert self._init.stdin and self._init.stdout and self._init.stderr
        with suppress(BrokenPipeError):
            self._init.stdin.write("up\n")
            self._init.stdin.flush()
        if self._init.stdout.readline() != "up\n":
            raise RuntimeError(f"host {self.name}: {self._init.stderr.read().strip()}")
        self._must("hostname", self.name)
        self._must("mount", "--bind", str(names), "/etc/hosts")
        self._must("mount", "-t", "proc", "proc", "/proc")
        # /sys/class/net lists the interfaces of the namespace in which /sys was mounted.
        self._must("mount", "-t", "sysfs", "sysfs", "/sys")
        # Ranks on different hosts must not share memory.
        self._must("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")

    def _must(self, *argv: str) -> None:
        _succeed(f"host {self.name}: {' '.join(argv)}", self.run(argv, cwd="/", timeout=_SETUP_S))

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdout: int | IO[str] | None = subprocess.PIPE,
        stderr: int | IO[str] | None = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start `argv` on this host, as the leader of its own session, with an empty stdin.

        `env` is added to the caller's environment. For a long-lived process, use
        files for `stdout` and `stderr`: it would block on a full pipe. The process ends with the
        host.
        """
        if self._init.poll() is not None:
            # The pid may have been reused by another process, whose namespaces must not be entered.
            raise RuntimeError(f"host {self.name} is off")
        init = str(self._init.pid)
        enter = ["nsenter", "--target", init, "--net", "--mount", "--uts", "--ipc", "--"]
        # nsenter changes to / with the mount namespace, so env changes to the caller's folder. Both
        # nsenter and env exec the command, so the pid is that of the command.
        folder = ["env", f"--chdir={cwd or os.getcwd()}", "--"]
        with _children_in_pid_namespace_of(self._init.pid):
            process = subprocess.Popen(
                [*enter, *folder, *argv],
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float = 30.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` on this host until it ends. The caller must check the exit status.

        After `timeout` seconds its process group gets SIGTERM, then SIGKILL, and
        `subprocess.TimeoutExpired` is raised with the output so far.
        """
        process = self.popen(argv, env=env, cwd=cwd)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            out, err = _end(process)
            late = subprocess.TimeoutExpired(list(argv), timeout, out, err)
            late.add_note(f"on host {self.name}\nstdout: {out}\nstderr: {err}")
            raise late from None
        except BaseException:
            _end(process)
            raise
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def power_off(self) -> None:
        """Kill every process of this host at once and wait until they are gone."""
        self._init.kill()
        # The init of a PID namespace ends only after all other processes in it were reaped. The
        # processes that this object started are children of the test process: reap them here.
        for process in self._started:
            process.wait(_SETUP_S)
        self._init.wait(_SETUP_S)
        for pipe in (self._init.stdin, self._init.stdout, self._init.stderr):
            assert pipe
            pipe.close()


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    # SIGTERM first: srun and mpirun then end their remote processes as well.
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:  # not reaped, so no other process can have its pid
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        # A process that left the group may keep the pipes open, so the wait is limited.
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=_GRACE_S)
    return "", "(the pipes were still open after SIGKILL)"


def _succeed(what: str, done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode != 0:
        raise RuntimeError(f"{what}: exit status {done.returncode}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Network:
    """Hosts n1, n2, ... at 10.77.0.1, 10.77.0.2, ... on a bridge in the hub, 10.77.0.254.

    Each host has one interface, eth0. Its other end is in the hub and has the host's name:
    `hub.run(["ip", "link", "set", "n2", "down"])` cuts n2 off.
    """

    hub: Host
    hosts: tuple[Host, ...]


@contextmanager
def network(count: int = 2) -> Iterator[Network]:
    """Create `count` hosts that reach each other by name. They are removed on exit."""
    if not 1 <= count <= 253:
        raise ValueError(f"network({count}): 10.77.0.0/24 has room for 1 to 253 hosts and the hub")
    places = {"hub": "10.77.0.254"} | {f"n{i}": f"10.77.0.{i}" for i in range(1, count + 1)}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-"))
        names = Path(folder, "hosts")
        names.write_text(
            "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
            + "".join(f"{address} {name}\n" for name, address in places.items())
        )
        names.chmod(0o644)  # all users of a host must be able to resolve names
        hosts = []
        for name, address in places.items():
            host = Host(name, address)
            stack.callback(host.power_off)
            host._boot(names)
            hosts.append(host)
        _connect(hosts[0], hosts[1:])
        yield Network(hosts[0], tuple(hosts[1:]))


def _connect(hub: Host, hosts: Sequence[Host]) -> None:
    """Connect each host to a bridge in the hub with a veth pair."""
    at_hub = [
        "link set lo up",
        "link add bridge type bridge",
        f"address add {hub.address}/24 dev bridge",
        "link set bridge up",
    ]
    for host in hosts:
        peer = f"peer name eth0 netns {host._init.pid}"
        at_hub += [
            f"link add {host.name} type veth {peer}",
            f"link set {host.name} master bridge up",
        ]
    _ip(hub, at_hub)
    for host in hosts:
        address = f"address add {host.address}/24 dev eth0"
        _ip(host, ["link set lo up", address, "link set eth0 up"])


def _ip(host: Host, lines: Sequence[str]) -> None:
    # Only the network namespace is entered, so pids in `lines` are pids of the machine.
    done = subprocess.run(
        ["nsenter", "--target", str(host._init.pid), "--net", "--", "ip", "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=_SETUP_S,
    )
    _succeed(f"host {host.name}: ip -batch", done)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create the hosts n1 and n2, which reach each other by name."""
    with network(2) as made:
        first, second = made.hosts
        yield first, second


@functools.cache
def hosts_missing() -> str | None:
    """Return why no hosts can be made here, for `pytest.mark.skipif`, or None if they can."""
    if os.geteuid() != 0:
        return "hosts need root (network namespaces)"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"hosts need {', '.join(absent)}: install iproute2, util-linux, coreutils, hostname"
    # Root in a container may lack capabilities, and the kernel may lack the bridge module, so
    # whether hosts can be made is found by making one.
    try:
        with network(1):
            return None
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"hosts cannot be made here: {error}"
