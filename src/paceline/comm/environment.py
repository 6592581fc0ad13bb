"""The launcher's environment variables, checked before any process group exists.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are the standard ones, set by torchrun, by Slurm scripts and by
`paceline run` alike. If none of them is set there is one worker; if only some are set, the error names all that are
missing. PACELINE_* carry the options of the command line, and where our launcher serves the store.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.comm.credentials import JOB
from paceline.comm.store_address import STORE, StoreAddress
from paceline.errors import PeerError, UsageError, nearest

STANDARD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SERVED = "TORCHELASTIC_USE_AGENT_STORE"  # set to True by torchrun: its agent serves torch's store at MASTER_ADDR
# Overrides which way operations take, which is otherwise chosen from the workers' hosts: route.py.
COLLECTIVES = "PACELINE_COLLECTIVES"
FLAT, HOST, HIERARCHICAL = WAYS = ("flat", "host", "hierarchical")
EVENTS = "PACELINE_EVENTS"
KNOBS = "PACELINE_SET"  # a JSON object: knobs of the method and arguments of prepare
TRACE, TRACE_STEPS = "PACELINE_TRACE", "PACELINE_TRACE_STEPS"
PACE = "PACELINE_PACE"  # speed of an emulated link in bytes a second


@dataclass(frozen=True)
class Environment:
    """This worker's rank among the workers, and the options of the command line."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = ""
    port: int = 0
    served: bool = False  # another launcher serves torch's store at address:port
    one_host: bool = False  # all workers are known to be on this host
    store: StoreAddress | None = None  # where our launcher serves the store; otherwise worker 0 does
    job: str = ""
    method: str | None = None  # paceline run --method
    knobs: dict[str, Any] | None = None  # paceline run --set
    events: Path | None = None  # where telemetry goes
    collectives: str | None = None  # one of WAYS
    trace: Path | None = None  # where a timeline of the last steps goes
    trace_steps: int = 50

    @classmethod
    def read(cls, env: Mapping[str, str] = os.environ) -> Environment:
        own = _own(env)
        missing = [name for name in STANDARD if not env.get(name)]
        if len(missing) == len(STANDARD):
            return cls(**own)
        if missing:
            raise UsageError(
                f"{', '.join(missing)} not set, but {', '.join(n for n in STANDARD if env.get(n))} is",
                why="a worker of several must know its rank, how many there are and where they meet",
                do="start the script with `paceline run --workers N script.py`, with torchrun, or set all four",
            )
        world_size = _whole(env, "WORLD_SIZE", low=1)
        rank = _whole(env, "RANK", low=0, high=world_size - 1)
        local_world_size = _whole(env, "LOCAL_WORLD_SIZE", low=1, high=world_size, default=world_size)
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=_whole(env, "LOCAL_RANK", low=0, high=local_world_size - 1, default=rank % local_world_size),
            local_world_size=local_world_size,
            address=_resolved(env["MASTER_ADDR"]),
            port=_whole(env, "MASTER_PORT", low=1, high=65535),
            served=env.get(SERVED, "").lower() == "true",
            one_host=env.get("LOCAL_WORLD_SIZE") == str(world_size),
            store=StoreAddress.parse(env[STORE]) if env.get(STORE) else None,
            job=env.get(JOB, ""),
            **own,
        )


def _own(env: Mapping[str, str]) -> dict[str, Any]:
    return {
        "method": env.get("PACELINE_METHOD") or None,
        "knobs": _knobs(env.get(KNOBS, "")),
        "events": Path(env[EVENTS]) if env.get(EVENTS) else None,
        "collectives": _way(env.get(COLLECTIVES, "")),
        "trace": Path(env[TRACE]) if env.get(TRACE) else None,
        "trace_steps": _whole(env, TRACE_STEPS, low=1, default=50),
    }


def _way(text: str) -> str | None:
    if text and text not in WAYS:
        raise UsageError(f"{COLLECTIVES}={text!r} is not a way that operations can take", do=nearest(text, WAYS))
    return text or None


def _knobs(text: str) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        knobs = json.loads(text)
    except (ValueError, RecursionError):
        knobs = None
    if not isinstance(knobs, dict):
        raise UsageError(
            "PACELINE_SET is not a JSON object", why=f"it begins with {text[:40]!r}", do="use paceline run --set"
        )
    return knobs


def _whole(env: Mapping[str, str], name: str, *, low: int, high: int | None = None, default: int | None = None) -> int:
    text = env.get(name)
    if not text and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a whole number") from None
    if value < low or (high is not None and value > high):
        span = f"{low}..{high}" if high is not None else f"{low} or more"
        raise UsageError(f"{name}={value} is not in {span}", do=f"set {name} to {span}")
    return value


def _resolved(host: str) -> str:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise PeerError(
            f"cannot resolve MASTER_ADDR={host!r}",
            why=str(error),
            do="give the address of the host of worker 0, as this host knows it",
        ) from None
    return host


def attempt(env: Mapping[str, str] = os.environ) -> str:
    """What another launcher or a batch system calls this attempt of this job, which tells it apart from others."""
    run = env.get("TORCHELASTIC_RUN_ID") or env.get("SLURM_JOB_ID") or "run"
    return f"paceline/{run}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def pace_mbit() -> float:
    """The speed of the emulated link in Mbit/s; infinite if no link is emulated."""
    rate = float(os.environ.get(PACE) or 0)
    return rate * 8e-6 if rate else math.inf


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def odd_settings(env: Mapping[str, str] = os.environ) -> list[str]:
    """Warnings about settings that the library which reads them would ignore silently."""
    threads = env.get("OMP_NUM_THREADS", "")
    counts = [count.strip() for count in threads.split(",")]
    if threads and not all(count.isdecimal() and int(count) for count in counts):
        return [f"OMP_NUM_THREADS={threads!r} is not a number of threads and is ignored"]
    return []


def check_transport(env: Mapping[str, str] = os.environ) -> None:
    """Raise for settings that gloo would reject late with an unclear error, or would ignore."""
    asked = env.get("GLOO_SOCKET_IFNAME")
    for name in (asked or "").split(","):
        if asked and name not in interfaces():
            raise UsageError(f"GLOO_SOCKET_IFNAME names {name!r}, which does not exist", do=nearest(name, interfaces()))
    if env.get("GLOO_DEVICE_TRANSPORT", "TCP").upper() not in ("", "TCP"):
        raise UsageError(
            f"GLOO_DEVICE_TRANSPORT={env['GLOO_DEVICE_TRANSPORT']} asks for a transport this torch build does not have",
            why="gloo is built without TLS here, and falling back to clear text silently would be worse",
            do="unset it, and use a trusted network, WireGuard or IPsec between the hosts",
        )
