"""Jobs: the job file, and training from a job to a finished run."""

from shoal.jobs.config import Data, Job, Origins, Run, Train
from shoal.jobs.read import load_job

__all__ = ["Data", "Job", "Origins", "Run", "Train", "load_job"]
