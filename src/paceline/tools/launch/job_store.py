"""The store of a job as its launcher has it: served on the first host, joined on the others.

On one host the store is a unix socket in a folder that only this user can enter, so that no port is open. Between
hosts it is a port on the one address given; who connects must have the secret, if there is one (credentials.py). The
launchers of the other hosts say what they were asked to start. If it is the same they are let in, and told the name of
the job.

The workers' MASTER_ADDR and MASTER_PORT are not the store's: they are for a process group that the script makes by
itself, whose own store worker 0 then serves there. The port is kept for it by a socket that is bound and does not
listen.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from paceline.comm.cause import CAUSE, Cause
from paceline.comm.credentials import SECRET_FILE, Credentials, read_secret
from paceline.comm.store import Store, StoreConnection
from paceline.comm.store_address import STORE, StoreAddress, make_folder
from paceline.comm.store_server import StoreServer
from paceline.tools.launch import guardian
from paceline.tools.launch.site import LaunchSite

_JOIN_S = 86400.0  # how long the other hosts wait for the first one, unless they are told to stop
_CONNECT_S = 30.0


class JobStore:
    """This launcher's part of the job's store. say: called with a line that the user should see."""

    def __init__(self, site: LaunchSite, argv: list[str], workers: int, say: Callable[[str], None]) -> None:
        self.site, self._say = site, say
        self.master_port = 0  # for the script's own process group
        self.variables: dict[str, str] = {}  # by which the workers find the store
        self._server: StoreServer | None = None
        self._connection: StoreConnection | None = None
        self._folder: str | None = None
        self._reserved: socket.socket | None = None
        script = next((Path(word).name for word in argv[1:] if not word.startswith("-")), "")
        terms = {"hosts": ",".join(site.names), "workers": str(workers), "script": script}
        self._terms = json.dumps(terms) if site.hosts > 1 else ""

    @property
    def store(self) -> Store:
        """The store, once it is served or joined."""
        if self._connection is None:
            raise RuntimeError("the store has not been opened")
        return Store(self._connection)

    def serve(self) -> None:
        """Serve the store: on the first host, before any worker starts."""
        site = self.site
        secret = secrets.token_hex(32).encode() if site.lab else read_secret()
        credentials = Credentials.new(secret, self._terms)
        if site.hosts > 1 and not secret:
            self._say(f"no secret: whoever reaches {site.own_address}:{site.port} may join (set {SECRET_FILE})")
        if site.hosts == 1 and not site.lab:
            self._folder = make_folder(guardian.folder_name())
            address = StoreAddress(path=f"{self._folder}/store")
            listener = address.listen()
        else:
            listener = site.inside(site.listen)
            address = StoreAddress(host=site.address, port=listener.getsockname()[1])
        self._reserved = site.inside(self._reserve)
        self.master_port = self._reserved.getsockname()[1]
        note = {"served_by": "launcher", "master_port": self.master_port}
        self._server = StoreServer(listener, credentials, say=self._say, note=note)
        self._use(address, credentials)

    def connect(self) -> None:
        """Connect to the store that this launcher serves."""
        address, credentials = self._where
        self._connection = self.site.inside(
            lambda: StoreConnection.open(
                address, Credentials(credentials.job, credentials.secret), "launcher 0", _CONNECT_S
            )
        )

    def join(self, given_up: Callable[[], bool]) -> None:
        """Connect to the store of the first host, which may be started later than this one."""
        site = self.site
        address, shown = StoreAddress(host=site.address, port=site.port), Credentials("", read_secret(), self._terms)
        who = f"the launcher of host {site.index} ({site.own_address})"
        self._connection = StoreConnection.open(address, shown, who, _JOIN_S, given_up=given_up)
        told = self._connection.told
        self.master_port = int(told["master_port"])
        gone = Cause(
            None,
            f"host {site.index} ({site.own_address}) does not answer any more",
            why="its launcher was killed, or the link to it is cut",
            do="look at that host",
        )
        self.store.leave_will(CAUSE, gone.encode())
        self._use(address, Credentials(str(told["job"]), shown.secret))

    def _use(self, address: StoreAddress, credentials: Credentials) -> None:
        self._where = address, credentials
        self.variables = {STORE: str(address), **credentials.variables()}

    def _reserve(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in self.site.own_address else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self.site.own_address, 0))
        return sock

    def close(self) -> None:
        """Close the store, and remove what it left on this host."""
        if self._connection is not None:
            self._connection.end()
        if self._server is not None:
            self._server.close()
        if self._reserved is not None:
            self._reserved.close()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._folder)
