"""A real Slurm on one machine: a controller in the hub and one slurmd on each host.

Needs root and Debian's slurm-wlm and munge; no service of the machine is used or changed. There is
no accounting database, so `sacct` does not work: use `squeue` and `scontrol`.
"""

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT, CompletedProcess, Popen, TimeoutExpired
from typing import IO

from hosts import Host, hosts_missing, network

CPUS_PER_NODE = 4  # config_overrides allows more CPUs than the machine has

_DAEMONS = ("munged", "slurmctld", "slurmd")
_CLIENTS = ("srun", "sbatch", "salloc", "scancel", "scontrol", "sinfo", "squeue")
_START_S = 20.0  # seconds; a start takes one or two
_POLL_S = 0.05

# No cgroups, no accounting, no task affinity: jobs only need to start processes.
# SchedulerParameters: a batch job starts within 1 s; the default is 3 s.
_CONF = """\
ClusterName=tutti
SlurmctldHost={hub.name}({hub.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.{hub.name}.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,bf_interval=1
ReturnToService=2
SlurmdTimeout=15
KillWait=3
NodeName=n[1-{count}] NodeAddr=10.77.0.[1-{count}] CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# A host has no cgroups mounted, and slurmd refuses to start if it detects neither cgroup version.
# With an explicit version it skips the detection; nothing in _CONF makes it use cgroups.
_CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"


@dataclass(frozen=True)
class SlurmCluster:
    """A running Slurm: nodes n1, n2, ... and the hub, where clients run. See `slurm_cluster`.

    Everything of the cluster is in `folder`; a job's own output belongs in the test's folder.
    """

    folder: Path
    hub: Host
    nodes: tuple[Host, ...]

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float = 30.0,
    ) -> CompletedProcess[str]:
        """Run a client (srun, sbatch, scontrol, ...) in the hub. See `Host.run`.

        The notes of `subprocess.TimeoutExpired` contain the daemons' logs.
        """
        try:
            return self.hub.run(argv, env=self._environment(env), cwd=cwd, timeout=timeout)
        except TimeoutExpired as error:
            error.add_note(self.logs())
            raise

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdout: int | IO[str] | None = PIPE,
        stderr: int | IO[str] | None = PIPE,
    ) -> Popen[str]:
        """Start a client in the hub. See `Host.popen`."""
        env = self._environment(env)
        return self.hub.popen(argv, env=env, cwd=cwd, stdout=stdout, stderr=stderr)

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), **(env or {})}

    def wait_for_job(self, job_id: int | str, timeout: float = 30.0) -> str:
        """Wait until a batch job has left the queue. Return its state: COMPLETED, FAILED, ..."""

        def left_the_queue() -> bool:
            queue = self.run(["squeue", "--noheader", "--format=%i", f"--jobs={job_id}"])
            # Slurm forgets a job some time after its end. Any other error proves nothing.
            forgotten = "Invalid job id" in queue.stderr
            return forgotten or (queue.returncode == 0 and not queue.stdout.strip())

        self._wait(left_the_queue, timeout, f"job {job_id} to leave the queue")
        shown = self.run(["scontrol", "show", "job", str(job_id)]).stdout.split()
        return next((word[9:] for word in shown if word.startswith("JobState=")), "UNKNOWN")

    def logs(self) -> str:
        """Return the daemons' logs, for the message of a failed test."""
        parts = []
        for output in sorted(self.folder.glob("*.output")):
            # A log contains the output and the messages of job steps. There is no log of munged,
            # nor of a daemon that failed early.
            log = output.with_suffix(".log")
            file = log if log.exists() else output
            parts.append(f"--- {file.name}\n{file.read_text(errors='replace')}")
        return "\n".join(parts)

    def _start(self) -> None:
        daemons: list[Popen[str]] = []

        def start(host: Host, name: str, *arguments: str) -> None:
            with open(self.folder / f"{name}.{host.name}.output", "w") as output:
                env = self._environment(None)
                argv = [name, *arguments]
                daemons.append(host.popen(argv, env=env, cwd="/", stdout=output, stderr=STDOUT))

        def wait(done: Callable[[], bool], what: str) -> None:
            def done_or_failed() -> bool:
                return done() or any(daemon.poll() is not None for daemon in daemons)

            self._wait(done_or_failed, _START_S, what)
            if not done():
                raise RuntimeError(f"a daemon of Slurm has ended\n{self.logs()}")

        conf, socket = self.folder / "slurm.conf", self.folder / "munge.socket"
        files = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "seed")]
        # --force: by default munged refuses to run as root, or with files below a folder like /tmp.
        start(self.hub, "munged", "--foreground", "--force", f"--socket={socket}", *files)
        # In this order, because a client sleeps a second or more if its daemon does not run yet.
        wait(socket.exists, "munged to listen")
        start(self.hub, "slurmctld", "-D", "-f", str(conf))
        wait(self._controller_answers, "slurmctld to answer")
        for node in self.nodes:
            start(node, "slurmd", "-D", "-f", str(conf))
        wait(self._nodes_are_idle, "all nodes to be idle")

    def _controller_answers(self) -> bool:
        return self.run(["scontrol", "ping"]).returncode == 0

    def _nodes_are_idle(self) -> bool:
        states = self.run(["sinfo", "--noheader", "--Node", "--format=%T"]).stdout.split()
        return states == ["idle"] * len(self.nodes)

    def _wait(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout:g} s for {what}\n{self.logs()}")
            time.sleep(_POLL_S)


@contextmanager
def slurm_cluster(nodes: int = 2) -> Iterator[SlurmCluster]:
    """Start a Slurm of `nodes` nodes with `CPUS_PER_NODE` CPUs each. It is removed on exit."""
    # The folder is removed after the hosts, so that no daemon still writes to it.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, network(nodes) as hosts:
        folder = Path(name)
        (folder / "state").mkdir()
        text = _CONF.format(folder=folder, hub=hosts.hub, count=nodes, cpus=CPUS_PER_NODE)
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text(_CGROUP_CONF)
        # munged refuses a key that others may read.
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        cluster = SlurmCluster(folder, hosts.hub, hosts.hosts)
        cluster._start()
        yield cluster


def slurm_missing() -> str | None:
    """Return why no Slurm can run here, for `pytest.mark.skipif`, or None if it can."""
    absent = [tool for tool in (*_DAEMONS, *_CLIENTS) if shutil.which(tool) is None]
    if absent:
        return f"a Slurm cluster needs {', '.join(absent)}: install slurm-wlm and munge"
    return hosts_missing()
