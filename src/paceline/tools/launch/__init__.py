"""Starting a job's workers on this host, and watching them until the last one has ended."""

from paceline.comm.cause import CAUSE, Cause
from paceline.tools.launch.environment import cores, worker_env
from paceline.tools.launch.job import MOST_WORKERS, JobSpec, LocalJob, forwarding_signals, launch
from paceline.tools.launch.output import WorkerOutput
from paceline.tools.launch.site import PORT, LaunchSite, own_addresses
from paceline.tools.launch.supervisor import GRACE_S, LaunchedWorker, Supervisor, WorkerCommand

__all__ = [
    "CAUSE",
    "GRACE_S",
    "MOST_WORKERS",
    "PORT",
    "Cause",
    "JobSpec",
    "LaunchSite",
    "LaunchedWorker",
    "LocalJob",
    "Supervisor",
    "WorkerCommand",
    "WorkerOutput",
    "cores",
    "forwarding_signals",
    "launch",
    "own_addresses",
    "worker_env",
]
