"""The store that workers meet in: what it answers, what it bounds, and who gets in. Threads and real sockets."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import frames, store_server
from paceline.comm.cause import Cause
from paceline.comm.credentials import Credentials, read_secret
from paceline.comm.dist import Transport
from paceline.comm.frames import Code, Frame, FrameError, joined, pack, parse, split
from paceline.comm.store import Store, StoreConnection, StoreLostError
from paceline.comm.store_address import StoreAddress, make_folder
from paceline.comm.store_server import StoreServer
from paceline.errors import MismatchError, PeerTimeoutError, UsageError

SECRET = b"a secret of the tests"
TERMS = '{"hosts": "a,b", "workers": "2", "script": "train.py"}'


class Served:
    """A store, and connections to it; `said` is what it told of those it refused."""

    def __init__(self, address, credentials):
        self.said = []
        listener = address.listen()
        if not address.path:
            address = address._replace(port=listener.getsockname()[1])
        self.address, self.credentials = address, credentials
        self.server = StoreServer(listener, credentials, say=self.said.append, note={"served_by": "launcher"})
        self._open = []

    def connect(self, *, job=None, secret=None, terms="", who="worker 0", seconds=10.0):
        shown = Credentials(
            self.credentials.job if job is None else job, self.credentials.secret if secret is None else secret, terms
        )
        self._open.append(StoreConnection.open(self.address, shown, who, seconds))
        return Store(self._open[-1])

    def raw(self):
        """A connection that has read the challenge and said nothing."""
        sock = self.address.connect(10.0)
        sock.settimeout(10.0)
        assert parse(sock.recv(4096))[0].code == Code.HELLO
        return sock

    def close(self):
        for connection in self._open:
            connection.end()
        self.server.close()


@pytest.fixture(params=["unix", "tcp"])
def served(request, tmp_path):
    address = StoreAddress(str(tmp_path / "s")) if request.param == "unix" else StoreAddress("", "127.0.0.1", 0)
    one = Served(address, Credentials.new(SECRET, TERMS))
    yield one
    one.close()


def closed(sock):
    """Whether the other side ends the connection; what it may say before that is not looked at."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


# ---------------------------------------------------------------------------------------------------- frames

fields = st.lists(st.binary(max_size=50), max_size=6)


@given(st.integers(0, 2**32 - 1), st.sampled_from(Code), fields, st.binary(max_size=30))
def test_a_frame_is_read_as_it_was_written(number, code, parts, behind):
    data = pack(number, code, parts)
    assert parse(data + behind) == (Frame(number, code, tuple(parts)), len(data))
    assert all(parse(data[:n]) is None for n in range(len(data)))
    assert split(joined(parts)) == tuple(parts)


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_a_frame_or_none_or_refused(data):
    with contextlib.suppress(FrameError):
        found = parse(data, longest=1000)
        assert found is None or pack(*found[0]) == data[: found[1]]
    with contextlib.suppress(FrameError):
        assert joined(split(data)) == data


@given(st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 255), st.binary(max_size=60))
@settings(max_examples=300)
def test_any_head_is_bounded_before_it_is_read(length, code, count, body):
    data = struct.pack("!IIBB", length, 7, code, count) + body
    try:
        found = parse(data, longest=4096)
    except FrameError:
        return
    assert length <= 4096
    assert found is None or found[1] <= len(data)


def test_what_is_too_long_is_not_packed():
    with pytest.raises(FrameError):
        pack(0, Code.SET, [b"x"] * 256)
    with pytest.raises(FrameError):
        parse(pack(0, Code.SET, [bytes(1000)]), longest=999)
    with pytest.raises(FrameError, match="more than"):
        split(bytes(4 * (1 << 17)))
    one_of_two = bytearray(pack(0, Code.SET, [b"key", b"value"]))
    one_of_two[9] = 1
    with pytest.raises(FrameError, match="behind the last field"):
        parse(one_of_two)
    assert frames.LONGEST_GREETING < frames.LONGEST


# ---------------------------------------------------------------------------------------------------- what it answers


def test_what_every_request_answers(served):
    one, other = served.connect(), served.connect().under("x")
    one.set("a", "1")
    assert (one.get("a"), one.check("a"), one.check("a", "b"), one.get("b")) == (b"1", True, False, None)
    assert other.get("a") is None, "it has a prefix"
    other.set("a", b"\x00\xff")
    assert one.get("x/a") == b"\x00\xff"
    assert (one.add("n", 3), one.add("n", -5)) == (3, -2)
    assert one.compare_set("c", "", "first") == b"first"
    assert one.compare_set("c", "", "second") == b"first"
    assert one.compare_set("c", "first", "second") == b"second"
    assert one.compare_set("new", "expected", "x") == b"expected"
    assert one.check("new") is False
    assert (one.delete("a", "nope"), one.check("a")) == (1, False)
    one.set("p/0", "zero")
    one.set("p/2", "")
    assert one.collected("p", 3) == {0: b"zero", 2: b""}
    assert one.count_keys() == 5


def test_waits_end_when_the_keys_are_set_and_hold_up_no_other_thread(served):
    one, other = served.connect(), served.connect()
    all_, any_ = one.when_all(["a", "b"], 60.0), one.when_any(["b", "c"], 60.0)
    collected = one.collect("r", 3, 60.0)
    other.set("b", "2")
    assert any_.fields() == (b"b", b"2")
    assert not all_.has_come
    assert one.get("b") == b"2", "another request of the same connection"
    other.set("a", "1")
    assert split(all_.fields()[0]) == (b"1", b"2")
    for rank in (2, 0):
        other.set(f"r/{rank}", str(rank))
    other.delete("r/0")
    other.set("r/1", "1")
    assert one.check("r/1")
    assert not collected.has_come, "one was taken back before all were there"
    other.set("r/0", "again")
    assert split(collected.fields()[0]) == (b"again", b"1", b"2")


def test_a_wait_ends_at_its_deadline(served):
    one = served.connect()
    assert one.when_any(["never"], 0.05).fields() is None
    assert one.get("never", 0.05) is None
    one.set("r/1", "here")
    late = one.collect("r", 2, 0.05)
    assert late.fields() is None
    assert split(late.partial()[0]) == (b"", b"1here")


def test_a_world_meets_in_as_many_requests_as_it_has_workers(served, monkeypatch):
    asked = []
    real = StoreServer._answer
    monkeypatch.setattr(StoreServer, "_answer", lambda *args: (asked.append(args[2].code), real(*args)))
    stores = [served.connect() for _ in range(8)]
    answers = []
    for rank, store in enumerate(stores):
        store.set(f"here/{rank}", str(rank))
        answers.append(store.collect("here", 8, 60.0))
    assert all(split(answer.fields()[0]) == tuple(b"%d" % r for r in range(8)) for answer in answers)
    assert len(asked) == 2 * 8


def test_a_will_is_done_when_a_process_ends_without_a_word(served):
    one, two, three, four = (served.connect() for _ in range(4))
    two.leave_will("dead", "2")
    three.leave_will("dead", "3")
    three.take_back_will()
    three.connection.end()
    news = one.when_any(["dead"], 60.0)
    assert one.get("dead", 0.1) is None
    two.connection.end()
    assert news.fields() == (b"dead", b"2")
    four.leave_will("dead", "4")
    four.connection.end()
    assert one.get("dead", 0.1) == b"2", "the first one stands"


def test_a_store_that_ends_ends_every_wait(served):
    one = served.connect()
    wait = one.when_any(["never"], 60.0)
    threading.Timer(0.05, served.server.close).start()
    with pytest.raises(StoreLostError, match="does not answer any more"):
        wait.fields()
    with pytest.raises(StoreLostError):
        one.set("a", "b")


def test_a_store_that_is_silent_is_given_up(served, monkeypatch):
    one = served.connect()
    monkeypatch.setattr("paceline.comm.store.ANSWER_S", 0.2)
    monkeypatch.setattr(StoreServer, "_answer", lambda *_: None)
    with pytest.raises(StoreLostError, match="no answer to set"):
        one.set("a", "b")


def test_a_fork_keeps_no_connection_open(served):
    """Or a killed worker's data loaders would hide its death."""
    one = served.connect()
    read, write = os.pipe()
    if (worker := os.fork()) == 0:
        served.connect().leave_will("dead", "2")
        if os.fork() == 0:  # a process of its data loader, which outlives it
            os.close(write)
            os.read(read, 1)
        os._exit(0)
    try:
        assert one.get("dead", 5.0) == b"2"
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(worker, 0)


def test_torch_makes_groups_over_it(served, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = [None, None]

    def work(rank):
        made[rank] = Transport(served.connect(), timeout_s=20.0).connect("lane", rank, 2)["cpu"]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(group.rank(), group.size()) for group in made] == [(0, 2), (1, 2)]


def test_torch_sees_a_store(served):
    transport = Transport(served.connect().under("job"), timeout_s=0.2)
    store = transport.torch_store("a")
    assert isinstance(store, dist.PrefixStore)
    store.set("k", "v")
    assert (store.get("k"), store.check(["k"]), store.add("n", 2), store.num_keys()) == (b"v", True, 2, 2)
    assert store.compare_set("k", "v", "w") == b"w"
    assert store.delete_key("k") is True
    assert transport.store.get("a/n") == b"2"
    with pytest.raises(RuntimeError, match="not set within"):
        store.get("never")


# ---------------------------------------------------------------------------------------------------- who gets in


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ({"secret": b"another secret, guessed"}, "wrong secret"),
        ({"secret": b""}, "wrong secret"),
        ({"job": "another job"}, "it belongs to another job"),
        ({"job": "", "terms": TERMS.replace("train.py", "other.py")}, "script: 'other.py' there, 'train.py' here"),
        ({"job": "", "terms": "[" * 900}, "cannot be read"),
        ({"job": ""}, "it was started for something else"),
    ],
)
def test_a_stranger_is_refused_by_name_and_said_once(served, shown, words):
    for _ in range(2):
        with pytest.raises(MismatchError) as raised:
            served.connect(**shown)
        assert words in str(raised.value)
    assert len(served.said) == 1
    assert words in served.said[0]


def test_who_names_no_job_is_refused_where_no_launcher_could_be_meant(tmp_path):
    one = Served(StoreAddress(str(tmp_path / "s")), Credentials.new(SECRET))
    with pytest.raises(MismatchError, match="does not say which job"):
        one.connect(job="")
    one.close()


def test_a_launcher_that_was_asked_for_the_same_is_told_the_job(served):
    assert served.connect(job="", terms=TERMS).connection.told["job"] == served.credentials.job


def test_a_server_that_does_not_know_the_secret_is_found_out(tmp_path):
    """It may let everybody in, but cannot prove that it knows the secret."""

    class Liar(Credentials):
        def refusal(self, frame, challenge):
            return ""

    liar = Served(StoreAddress(str(tmp_path / "s")), Liar("job", b"not the real secret"))
    try:
        with pytest.raises(MismatchError, match="does not have the job's secret"):
            liar.connect(job="job", secret=SECRET)
    finally:
        liar.close()


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 40, pack(0, Code.HELLO, [b"short"])])
def test_a_foreign_listener_is_named_at_once(says):
    with socket.create_server(("127.0.0.1", 0)) as foreign:

        def answer():
            sock, _ = foreign.accept()
            sock.sendall(says)
            closed(sock)
            sock.close()

        threading.Thread(target=answer, daemon=True).start()
        address = StoreAddress("", "127.0.0.1", foreign.getsockname()[1])
        with pytest.raises(MismatchError, match="is not the store of a job of Paceline"):
            StoreConnection.open(address, Credentials("job"), "worker 1", 30.0)


def test_a_listener_that_says_nothing_is_named(monkeypatch):
    monkeypatch.setattr("paceline.comm.store._GREETING_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = StoreAddress("", "127.0.0.1", silent.getsockname()[1])
        with pytest.raises(MismatchError, match="it says nothing within"):
            StoreConnection.open(address, Credentials("job"), "worker 1", 30.0)


def test_a_store_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PeerTimeoutError, match="worker 1 cannot reach the store at unix:"):
        StoreConnection.open(StoreAddress(str(tmp_path / "none")), Credentials("job"), "worker 1", 0.1)


@given(st.binary(min_size=1, max_size=300))
@settings(max_examples=60, deadline=None)
def test_garbage_is_closed_and_the_others_go_on(garbage_store, garbage):
    sock = garbage_store.raw()
    with contextlib.suppress(ConnectionError):
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
    assert closed(sock)
    sock.close()
    assert garbage_store.worker.add("n", 1) > 0


@given(st.sampled_from(Code), st.lists(st.binary(max_size=12), max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_worker_that_asks_nonsense_harms_nobody(garbage_store, code, parts):
    mad = garbage_store.connect()
    with contextlib.suppress(StoreLostError, ValueError):
        mad.connection.ask(code, *parts).fields() if code not in (Code.GET, Code.FIRST_OF, Code.COLLECT) else (
            mad.connection.ask(code, *parts)
        )
    mad.connection.end()
    assert garbage_store.worker.add("n", 1) > 0


@pytest.fixture(scope="module")
def garbage_store(tmp_path_factory):
    one = Served(StoreAddress(str(tmp_path_factory.mktemp("store") / "s")), Credentials.new(SECRET))
    one.worker = one.connect()
    yield one
    one.close()
    assert len(one.said) <= 1, "once for each address"


def test_a_flood_of_strangers_makes_room_and_slows_nobody(served, monkeypatch):
    worker = served.connect()
    with contextlib.ExitStack() as stack:
        for _ in range(2 * store_server.MOST_STRANGERS):
            stack.enter_context(served.address.connect(10.0))
        assert len(served.server._strangers) <= store_server.MOST_STRANGERS
        assert worker.add("n", 1) == 1
        assert served.connect().add("n", 1) == 2, "one that knows the secret gets in"
    assert len(served.said) == 1


def test_who_greets_too_slowly_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(store_server, "GREETING_S", 0.2)
    one = Served(StoreAddress(str(tmp_path / "s")), Credentials.new(SECRET))
    greeting, sent = pack(0, Code.HELLO, [bytes(1000)]), 0
    with one.raw() as sock:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < began + 10:  # a byte now and then
                sock.send(greeting[sent : (sent := sent + 1)])
                time.sleep(0.02)
        assert time.monotonic() < began + 10
    one.close()
    assert "did not say who it is" in one.said[0]


def test_memory_is_bounded(served, monkeypatch):
    monkeypatch.setattr(store_server, "_MOST_BYTES", 1000)
    monkeypatch.setattr(store_server, "_MOST_WAITS", 3)
    one = served.connect()
    one.set("a", bytes(900))
    with pytest.raises(StoreLostError, match="no room"):
        one.set("b", bytes(200))
    one.set("a", bytes(100))
    one.set("b", bytes(200))
    assert one.delete("a", "b") == 2
    one.set("a", bytes(900))
    waits = [one.when_any(["never"], 5.0) for _ in range(4)]
    with pytest.raises(StoreLostError, match="wait already"):
        waits[3].fields()
    assert not waits[0].has_come


def test_who_does_not_read_its_answers_is_closed(served, monkeypatch):
    monkeypatch.setattr(store_server, "_MOST_UNREAD", 3 << 20)
    one = served.connect()
    one.set("k", bytes(1 << 20))
    with served.address.connect(10.0) as sock:
        challenge = parse(sock.recv(4096))[0].fields[0]
        sock.sendall(served.credentials.hello(challenge, bytes(32), "worker 1"))
        with contextlib.suppress(ConnectionError):
            for i in range(40):
                sock.sendall(pack(i, Code.GET, [frames.number(0), joined([b"k"])]))
        one.set("k", b"the others are served meanwhile")
        until = time.monotonic() + 10.0
        while not served.said and time.monotonic() < until:
            time.sleep(0.01)
    assert "it does not read its answers" in served.said[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_is_refused():
    """Even where the folder and the socket are open to all."""
    folder = Path(make_folder())
    assert folder.stat().st_mode & 0o777 == 0o700
    one = Served(StoreAddress(str(folder / "s")), Credentials.new(SECRET))
    folder.chmod(0o755)
    (folder / "s").chmod(0o777)
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setuid(65534)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(one.address.path)
            os.write(write, b"got in" if sock.recv(100) else b"closed")
        except ConnectionError:
            os.write(write, b"closed")
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"closed"
    os.waitpid(pid, 0)
    os.close(read)
    one.close()
    shutil.rmtree(folder)
    assert "another user's process" in one.said[0]


# ---------------------------------------------------------------------------------------------------- the secret


def test_the_secret_comes_from_a_file_of_ones_own_or_a_variable(tmp_path):
    path = tmp_path / "secret"
    path.write_text("sixteen bytes, at least\n")
    path.chmod(0o600)
    assert read_secret({"PACELINE_SECRET_FILE": str(path)}) == b"sixteen bytes, at least"
    assert read_secret({"PACELINE_SECRET": "sixteen bytes, at least"}) == b"sixteen bytes, at least"
    assert read_secret({}) == b""


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "secret"
    path.write_text("sixteen bytes, at least")
    path.chmod(mode)
    with pytest.raises(UsageError, match=r"can be read by others(?s:.*)chmod 600"):
        read_secret({"PACELINE_SECRET_FILE": str(path)})


def test_secrets_that_are_none(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "empty").touch(0o600)
    for name, words in (("pipe", "is not a file"), ("missing", "cannot be read"), ("empty", "has 0 bytes")):
        with pytest.raises(UsageError, match=words):
            read_secret({"PACELINE_SECRET_FILE": str(tmp_path / name)})
    with pytest.raises(UsageError, match="has 5 bytes"):
        read_secret({"PACELINE_SECRET": "short"})
    with pytest.raises(UsageError, match="both set"):
        read_secret({"PACELINE_SECRET": "x" * 20, "PACELINE_SECRET_FILE": "y"})


def test_a_secret_is_shown_nowhere():
    assert "hidden" not in repr(Credentials("job", b"hidden, and long enough"))


def test_a_cause_stays_short():
    assert len(Cause(1, "x" * 10**6, "y" * 10**6).encode()) < 10_000
