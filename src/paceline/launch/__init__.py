"""Starting a job's workers on this host, and watching them until the last one has ended."""

from paceline.launch.crew import CAUSE, GRACE_S, MOST_WORKERS, Crew, forwarding, launch
from paceline.launch.output import Output
from paceline.launch.site import PORT, Site, cores, own_addresses
from paceline.launch.worker import Cause, Worker, die_with_parent, worker_env

__all__ = [
    "CAUSE",
    "GRACE_S",
    "MOST_WORKERS",
    "PORT",
    "Cause",
    "Crew",
    "Output",
    "Site",
    "Worker",
    "cores",
    "die_with_parent",
    "forwarding",
    "launch",
    "own_addresses",
    "worker_env",
]
