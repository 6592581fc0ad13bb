"""Who am I? The launcher's environment variables, checked before any process group exists.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are the standard ones, set by torchrun, by Slurm scripts and by
`paceline run` alike. None of them set means a world of one; some of them set is a mistake, and all that is missing is
named at once. PACELINE_* carry what the command line said.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PeerError, UsageError, nearest

STANDARD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The launcher serves the store itself, so no worker must. torchrun's agent says so in the same variable.
SERVED = "TORCHELASTIC_USE_AGENT_STORE"
# Which way operations take, where it is not to be found out from the hosts: wire/route.py.
COLLECTIVES = "PACELINE_COLLECTIVES"
FLAT, HOST, HIERARCHICAL = WAYS = ("flat", "host", "hierarchical")
TRACE, TRACE_STEPS = "PACELINE_TRACE", "PACELINE_TRACE_STEPS"


@dataclass(frozen=True)
class Environment:
    """This worker's place among the workers, and what the command line asked for."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = ""
    port: int = 0
    served: bool = False  # somebody else (the launcher) serves the store at address:port
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
        world = _whole(env, "WORLD_SIZE", low=1)
        rank = _whole(env, "RANK", low=0, high=world - 1)
        local_world = _whole(env, "LOCAL_WORLD_SIZE", low=1, high=world, default=world)
        return cls(
            rank=rank,
            world=world,
            local_rank=_whole(env, "LOCAL_RANK", low=0, high=local_world - 1, default=rank % local_world),
            local_world=local_world,
            address=_resolved(env["MASTER_ADDR"]),
            port=_whole(env, "MASTER_PORT", low=1, high=65535),
            served=env.get(SERVED, "").lower() == "true",
            **own,
        )


def _own(env: Mapping[str, str]) -> dict[str, Any]:
    return {
        "method": env.get("PACELINE_METHOD") or None,
        "knobs": _knobs(env.get("PACELINE_SET", "")),
        "events": Path(env["PACELINE_EVENTS"]) if env.get("PACELINE_EVENTS") else None,
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


def board_prefix(env: Mapping[str, str] = os.environ) -> str:
    """Where in the store this attempt's messages are: what a dead attempt left behind must not be read as news."""
    return f"paceline/{env.get('TORCHELASTIC_RUN_ID', 'run')}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def odd_settings(env: Mapping[str, str] = os.environ) -> list[str]:
    """Settings that are ignored where they are read, which nobody would notice."""
    threads = env.get("OMP_NUM_THREADS", "")
    counts = [count.strip() for count in threads.split(",")]
    if threads and not all(count.isdecimal() and int(count) for count in counts):
        return [f"OMP_NUM_THREADS={threads!r} is not a number of threads and is ignored"]
    return []


def check_transport(env: Mapping[str, str] = os.environ) -> None:
    """Refuse what gloo would only refuse deep inside, or not at all."""
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
