"""The script for sbatch: one task of srun is one rank.

Two minutes before the time limit (a fifth of a short one) the ranks get SIGTERM, save a checkpoint after the step in
progress, and end with 143; the job then queues again and resumes from there, as it does after a preemption. An attempt
that saved nothing ends the job: another one would be no longer.
"""

from __future__ import annotations

import math
import shlex

from shoal.errors import UserError
from shoal.jobs.cluster.request import Request
from shoal.jobs.cluster.script import beginning

NOTICE = 120
"""Seconds between SIGTERM and the time limit at most."""
LAST_RANKS = 600
"""Seconds that the others have once a rank has ended: rank 0 completes the checkpoint and writes the report. Ranks that
were stopped end with a code that is not 0, so Slurm must not end the others for it."""
STOPPED = 143
"""Exit code of ranks that SIGTERM has stopped."""
LOG = "slurm-%j.out"
"""Name of the output's file, in the run's logs; %j is the number of the job."""
_SECRET = "export SHOAL_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"


def sbatch_script(request: Request, file: str | None = None) -> str:
    """Returns the script. file: the path of the job file; by default its own. Raises UserError for parameter
    servers."""
    cluster = request.cluster
    if request.parameter_servers:
        raise UserError(
            f"ps_count = {request.parameter_servers}: ranks average gradients among themselves, so there is nothing "
            "for parameter servers to do: leave ps_count out"
        )
    cores = max(1, math.floor(cluster.cpus / request.ranks)) if cluster.cpus else None
    srun = ["srun", "--kill-on-bad-exit=0", f"--wait={LAST_RANKS}", *([f"--cpus-per-task={cores}"] if cores else [])]
    saved, began = (shlex.quote(str(request.record / each)) for each in ("checkpoints", "logs/began"))
    again = f'if [ "$code" -eq {STOPPED} ] && [ {saved} -nt {began} ]; then scontrol requeue "$SLURM_JOB_ID"; fi'
    lines = [
        *beginning(cluster, request.directory),
        *([f"touch {began}"] if request.file else []),
        f"{_SECRET}  # new for each attempt; srun hands it on",
        "code=0",
        f"{shlex.join([*srun, *request.rank(file)])} || code=$?",
        *([f"{again}  # time is over: it goes on later"] if request.file else []),
        '[ "$code" -eq 0 ] || exit "$code"',
        *(cluster.finish or []),
    ]
    asked = [f"#SBATCH {option}" for option in _options(request, cores)]
    return "\n".join([lines[0], *asked, *lines[1:], ""])


def _options(request: Request, cores: int | None) -> list[str]:
    cluster = request.cluster
    log = str(request.record / "logs").replace("%", "%%") + f"/{LOG}"
    given = {
        "--job-name": request.name,
        "--output": log,
        "--open-mode": "append",
        "--nodes": cluster.hosts,
        "--ntasks-per-node": request.ranks,
        "--cpus-per-task": cores,
        "--mem": f"{math.ceil(cluster.memory_bytes / 2**20)}M" if cluster.memory_bytes else None,
        "--gpus-per-node": cluster.gpus,
        "--time": _time(cluster.seconds) if cluster.seconds else None,
        "--partition": cluster.queue,
        "--signal": f"TERM@{min(NOTICE, (cluster.seconds or 5 * NOTICE) // 5)}",
    }
    written = [f"{name}={_word(str(value))}" for name, value in given.items() if value is not None]
    return [*written, "--requeue", *(cluster.options or [])]


def _word(text: str) -> str:
    """Quotes a value as sbatch reads it: double quotes, and no line of its own."""
    if any(c in text for c in '"\n\\'):
        raise UserError(f'{text!r} cannot be written into a line of #SBATCH: choose a name without ", \\ and line ends')
    return f'"{text}"' if any(c.isspace() or c in "#'" for c in text) else text


def _time(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"


def log_name(number: str) -> str:
    """Returns the name of the file with the output of a job, in the run's logs."""
    return LOG.replace("%j", number)
