"""Where this job's store is served, and by whom; and the connection to it, which a process has once.

[Note: who serves] Under `paceline run` it is the launcher, which tells its workers where by PACELINE_STORE. Otherwise
it is worker 0: at MASTER_ADDR and MASTER_PORT, which every worker knows; or, where torch has a store already (that of
torchrun's agent, or of a process group that the script has made), at a place of its own, which it tells the others
through that store, with a name and a secret for the job. Nothing else of ours goes through torch's store: its calls
have no time limit, and it knows no secret.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.comm.credentials import Credentials, read_secret
from paceline.comm.environment import Environment, attempt
from paceline.comm.store import Store, StoreConnection
from paceline.comm.store_address import StoreAddress
from paceline.comm.store_server import StoreServer
from paceline.errors import PeerTimeoutError, UsageError, plain

T = TypeVar("T")

_TRY_S = 2.0  # how long one address is tried: torch's store may hold that of an earlier attempt


@dataclass(frozen=True)
class MeetingPlace:
    """The store that the workers of a job meet in. server: where this process serves it."""

    connection: StoreConnection
    server: StoreServer | None = None

    def store(self) -> Store:
        """The store below a prefix that no earlier meeting of these workers has used."""
        global _meetings
        store = Store(self.connection)
        store = store.under(f"meeting {_meetings}") if _meetings else store
        _meetings += 1
        return store


_places: dict[Any, MeetingPlace] = {}  # of this process: one that is served cannot be opened twice
_meetings = 0  # how often this process has met the others: after a shutdown it may do so again


def find(env: Environment, timeout_s: float, group: Any = None) -> MeetingPlace:
    """This process's connection to the store, which is served first if that is this process's part.

    group: a process group of torch.distributed whose members meet, in place of all workers.
    """
    members = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
    key = (env.store, env.address, env.port, members)
    if key not in _places:
        _places[key] = _found(env, timeout_s, group, members)
    return _places[key]


def _found(env: Environment, timeout_s: float, group: Any, members: tuple[int, ...]) -> MeetingPlace:
    who = f"worker {env.rank}"
    if env.store is not None:
        credentials = Credentials(env.job, read_secret())
        return MeetingPlace(StoreConnection.open(env.store, credentials, who, timeout_s))
    if group is not None or dist.is_initialized():
        rank = env.rank if group is None else dist.get_rank(group)
        name = f"paceline/{','.join(map(str, members))}"
        return _through(lambda: dist.distributed_c10d._get_default_store(), name, rank, env, timeout_s)
    if env.served:
        timeout = datetime.timedelta(seconds=timeout_s)
        theirs = lambda: dist.TCPStore(env.address, env.port, None, False, timeout, wait_for_workers=False)  # noqa: E731
        return _through(theirs, attempt(), env.rank, env, timeout_s)
    credentials = Credentials(env.job or f"{attempt()} of {env.world_size}", read_secret())
    address = StoreAddress(host=env.address, port=env.port)
    server = StoreServer(_listen(address), credentials, say=_say, note={"served_by": 0}) if env.rank == 0 else None
    if server is not None and not credentials.secret and env.address not in ("localhost", "127.0.0.1", "::1"):
        _say(f"the store at {address} has no secret: whoever reaches that port may join (set PACELINE_SECRET_FILE)")
    return MeetingPlace(StoreConnection.open(address, credentials, who, timeout_s), server)


# ---------------------------------------------------------------------------------------------------- beside torch's


def _through(theirs: Callable[[], Any], name: str, rank: int, env: Environment, timeout_s: float) -> MeetingPlace:
    """Serve the store, or learn from torch's where it is served."""
    until = time.monotonic() + timeout_s
    what = f"torch's store at {env.address}:{env.port}" if env.port else "torch's store"
    torchs = _within(timeout_s, theirs, what)
    key = f"{name}/store"
    server = None
    if rank == 0:
        credentials = Credentials(secrets.token_hex(16), secrets.token_hex(32).encode())
        listener, address = _own_place(env)
        server = StoreServer(listener, credentials, say=_say, note={"served_by": 0})
        told = {"address": str(address), "job": credentials.job, "secret": credentials.secret.decode()}
        _within(timeout_s, lambda: torchs.set(key, json.dumps(told)), what)
        return MeetingPlace(StoreConnection.open(address, credentials, "worker 0", timeout_s), server)
    while True:
        told = json.loads(_within(until - time.monotonic(), lambda: torchs.get(key), what))
        address, credentials = StoreAddress.parse(told["address"]), Credentials(told["job"], told["secret"].encode())
        left = until - time.monotonic()
        try:
            return MeetingPlace(StoreConnection.open(address, credentials, f"worker {rank}", min(left, _TRY_S)))
        except PeerTimeoutError:
            if left < _TRY_S:
                raise


def _within(seconds: float, call: Callable[[], T], what: str) -> T:
    """The result of a call that may never return; after that time an error. The call's thread is left to itself."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="torch's store", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if results:
        return results[0]
    raise PeerTimeoutError(
        f"{what} does not answer" if not errors else f"{what} failed",
        why=str(errors[0]).splitlines()[0] if errors else f"nothing for {seconds:.0f} s",
        do="check MASTER_ADDR and MASTER_PORT, that the launcher or worker 0 runs, and the firewall between them",
        worker=0,
    )


def _own_place(env: Environment) -> tuple[socket.socket, StoreAddress]:
    """Where worker 0 serves the store if every worker can be told: a unix socket if all are on this host."""
    if env.one_host and sys.platform == "linux":
        address = StoreAddress(path=f"@paceline-{secrets.token_hex(16)}")  # in no folder: nothing stays if it is killed
        return address.listen(), address
    host = env.address or socket.gethostname()
    with contextlib.suppress(OSError):
        listener = StoreAddress(host=host).listen()
        found = listener.getsockname()
        if not found[0].startswith("127."):
            return listener, StoreAddress(host=host, port=found[1])
        listener.close()
    # The host's name is its loopback interface here, or MASTER_ADDR is another host.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect((env.address or "192.0.2.1", env.port or 9))  # nothing is sent
        own = str(probe.getsockname()[0])
    listener = StoreAddress(host="127.0.0.1" if own == "0.0.0.0" else own).listen()
    return listener, StoreAddress(host=listener.getsockname()[0], port=listener.getsockname()[1])


def _listen(address: StoreAddress) -> socket.socket:
    try:
        return address.listen()
    except OSError as error:
        with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as free:
            free.bind((address.host if error.errno == 98 else "", 0))
            other = free.getsockname()[1]
        raise UsageError(
            f"worker 0 cannot listen on {address.host}:{address.port}",
            why=str(error),
            do=f"set MASTER_PORT to a free port on every worker, say {other}; MASTER_ADDR must be worker 0's own",
        ) from None


def _say(line: str) -> None:
    print(f"paceline: {plain(line)}", file=sys.stderr, flush=True)
