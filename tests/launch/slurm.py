"""A cluster of Slurm on this host: a slurmctld, several slurmd and a munged of its own, from Debian's packages, with
all that they keep in one folder."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.launch.packages import debian

NODES = (socket.gethostname(), f"{socket.gethostname()}-2")
"""Ranks look for rank 0 on the first node by its name, which must lead to this host."""
CONFIGURATION = """
ClusterName=shoal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
PluginDir={library}/slurm-wlm
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """The folder of a cluster, and the variables of its users."""

    folder: Path
    variables: Mapping[str, str]

    def ask(self, *command: str) -> str:
        """Runs a command of Slurm and returns what it says."""
        done = subprocess.run(
            ["/usr/bin/env", *command],
            env={**os.environ, **self.variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, script: Path, *options: str) -> str:
        """Submits a batch script; returns the number of its job."""
        return re.findall(r"\d+", self.ask("sbatch", *options, str(script)))[-1]

    def state(self, job: str) -> str:
        return re.findall(r"JobState=(\w+)", self.ask("scontrol", "show", "job", job))[0]

    def wait(self, job: str, state: str, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while (now := self.state(job)) != state:
            assert time.monotonic() < deadline, self.ask("scontrol", "show", "job", job)
            assert now not in ("FAILED", "TIMEOUT", "NODE_FAIL"), f"the job is {now}"
            time.sleep(0.1)


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Runs a cluster of the nodes NODES in `folder`; skips the test where the packages cannot be had."""
    package = debian("slurm-wlm", "munge")
    library = package / "usr/lib" / f"{os.uname().machine}-linux-gnu"
    programs, path = package / "usr/sbin", f"{package / 'usr/bin'}:{os.environ['PATH']}"
    variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    variables["LD_LIBRARY_PATH"] = f"{library}:{library / 'slurm-wlm'}"
    _write_configuration(folder, library)
    munge = folder / "munge"
    with ExitStack() as running:

        def start(name: str, *arguments: str) -> None:
            log = running.enter_context(open(folder / f"{name}.out", "ab"))
            process = subprocess.Popen(
                [str(programs / name), *arguments], env={**os.environ, **variables}, stdout=log, stderr=log
            )
            running.callback(process.wait)
            running.callback(process.terminate)

        files = [f"--{each}-file={munge / each}" for each in ("key", "pid", "log", "seed")]
        start("munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        _until((munge / "socket").exists)
        start("slurmctld-wlm", "-D")
        for node in NODES:
            start("slurmd-wlm", "-D", "-N", node, "-d", str(programs / "slurmstepd-wlm"))
        slurm = Slurm(folder, variables)
        _until(lambda: slurm.ask("sinfo", "-h", "-t", "idle", "-p", "spot", "-o", "%D").strip() == str(len(NODES)))
        try:
            yield slurm
        finally:
            slurm.ask("scancel", "--user", getpass.getuser())
            _until(lambda: not slurm.ask("squeue", "-h"))


def _write_configuration(folder: Path, library: Path) -> None:
    for name in ("munge", "state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge/key").write_bytes(secrets.token_bytes(64))
    (folder / "munge/key").chmod(0o600)
    host = socket.gethostname()
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(len(NODES) + 1)]
        port, *ports = [each.getsockname()[1] for each in sockets]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={each} CPUs=4 RealMemory=1000"
        for name, each in zip(NODES, ports, strict=True)
    )
    values = {
        "host": host,
        "port": port,
        "user": getpass.getuser(),
        "folder": folder,
        "library": library,
        "nodes": nodes,
    }
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))


def _until(condition, seconds: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "Slurm did not come up"
        time.sleep(0.1)
