"""Bad input in the environment (FAULTS B1-B13, B16, B17): refused at once, by name, before any process group
exists.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import paceline
from paceline.comm.environment import Environment, check_transport, odd_settings
from paceline.comm.store_address import StoreAddress
from paceline.errors import PeerError, UsageError
from processes import free_port, run

GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_world_of_one_without_a_launcher():
    assert Environment.read({}) == Environment()


def test_a_good_one():
    env = Environment.read({**GOOD, "RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    assert (env.rank, env.world_size, env.local_rank, env.port, env.served) == (1, 2, 0, 29500, False)


def test_b1_every_missing_variable_is_named_at_once():
    with pytest.raises(UsageError, match="RANK, MASTER_PORT not set") as error:
        Environment.read({k: v for k, v in GOOD.items() if k not in ("RANK", "MASTER_PORT")})
    assert "paceline run" in error.value.do


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("WORLD_SIZE", "abc", "WORLD_SIZE='abc' is not a whole number"),  # B2
        ("WORLD_SIZE", "0", "WORLD_SIZE=0 is not in 1 or more"),  # B3
        ("WORLD_SIZE", "-3", "WORLD_SIZE=-3"),
        ("RANK", "5", r"RANK=5 is not in 0\.\.1"),  # B4
        ("RANK", "-1", r"RANK=-1 is not in 0\.\.1"),
        ("MASTER_PORT", "99999", r"MASTER_PORT=99999 is not in 1\.\.65535"),  # B5
        ("MASTER_PORT", "-1", "MASTER_PORT=-1"),
        ("MASTER_PORT", "80x", "MASTER_PORT='80x' is not a whole number"),
        ("LOCAL_RANK", "7", r"LOCAL_RANK=7 is not in 0\.\.1"),
    ],
)
def test_b2_to_b5_wrong_numbers(name, value, words):
    with pytest.raises(UsageError, match=words):
        Environment.read({**GOOD, name: value})


def test_b6_a_host_that_does_not_exist():
    with pytest.raises(PeerError, match=r"cannot resolve MASTER_ADDR='no-such-host\.invalid'"):
        Environment.read({**GOOD, "MASTER_ADDR": "no-such-host.invalid"})


def test_b7_an_empty_address_is_a_missing_one():
    with pytest.raises(UsageError, match="MASTER_ADDR not set"):
        Environment.read({**GOOD, "MASTER_ADDR": ""})


def test_b11_an_interface_that_does_not_exist():
    with pytest.raises(UsageError, match="'nope0', which does not exist") as error:
        check_transport({"GLOO_SOCKET_IFNAME": "nope0"})
    assert "lo" in error.value.do


def test_b12_tls_is_refused_rather_than_dropped():
    with pytest.raises(UsageError, match="TCP_TLS"):
        check_transport({"GLOO_DEVICE_TRANSPORT": "TCP_TLS"})


@pytest.mark.parametrize("text", ["x", "[1]", "[" * 100_000, "{", "3"])
def test_b24_knobs_that_are_no_object(text):
    with pytest.raises(UsageError, match="PACELINE_SET is not a JSON object"):
        Environment.read({"PACELINE_SET": text})


def test_b13_a_thread_count_that_is_none():
    assert "OMP_NUM_THREADS='banana'" in odd_settings({"OMP_NUM_THREADS": "banana"})[0]
    assert odd_settings({"OMP_NUM_THREADS": "4"}) == odd_settings({"OMP_NUM_THREADS": "4,2"}) == odd_settings({}) == []


def _prepare(rank, timeout=3.0):
    model = torch.nn.Linear(2, 2)
    paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout=timeout)


def test_b8_missing_workers_are_named():
    alone = run(1, _prepare, env={"WORLD_SIZE": "3"})[0]
    assert alone.error == "PeerTimeoutError"
    assert "workers [1, 2] of 3 did not come within 3 s" in alone.message


def _prepare_as_zero(rank):
    if rank:
        os.environ["RANK"] = "1"
    _prepare(rank, timeout=4.0)


def test_b10_two_workers_with_one_rank():
    outcomes = run(3, _prepare_as_zero)
    assert [o.error for o in outcomes].count("MismatchError") >= 1
    twice = next(o for o in outcomes if o.error == "MismatchError")
    assert "two workers say they are worker 1" in twice.message


def test_b9_a_port_that_is_taken():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        outcome = run(1, _prepare, env={"WORLD_SIZE": "2", "MASTER_PORT": str(taken.getsockname()[1])})[0]
    assert outcome.error == "UsageError"
    assert "cannot listen on 127.0.0.1" in outcome.message
    assert "say " in outcome.message


def test_the_store_listens_on_its_own_address_only():
    """Not on every interface, as c10d's does by itself."""
    address = StoreAddress(host="127.0.0.1", port=free_port())
    with address.listen() as sock:
        assert sock.getsockname() == ("127.0.0.1", address.port)
        with pytest.raises(OSError, match="in use"):
            address.listen()


@pytest.mark.parametrize(
    "address",
    [StoreAddress("/tmp/x/store"), StoreAddress("@x"), StoreAddress("", "h-1.x", 3), StoreAddress("", "::1", 9)],
)
def test_an_address_is_read_as_it_is_written(address):
    assert StoreAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "unix:x", "tcp:", "tcp:a:0", "tcp:a:99999", "tcp:a b:1", "http://x:1", "tcp:[::1:1"]
)
def test_an_address_that_is_none(text):
    with pytest.raises(UsageError, match="is not where a store is served"):
        StoreAddress.parse(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "glooo"}, "backend='glooo' is not available"),  # B16
        ({"timeout": 0}, "timeout=0 is out of range"),  # B17
        ({"timeout": -5.0}, "timeout=-5.0 is out of range"),
        ({"timeout": 1e9}, "at most 86400 seconds"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"batch": "globl"}, "did you mean 'global'"),
        ({"guard": "skipp"}, "did you mean 'skip'"),
        ({"accumulate": 0}, "accumulate=0 is not"),
        ({"accumulate": 2.0}, "accumulate=2.0 is not"),
        ({"bucket_mb": -1}, "bucket_mb=-1"),
        ({"weight": 3}, "weight=3 is not a function"),
        ({"learning_rte": 3}, "has no knob 'learning_rte'"),  # B18
        ({"acumulate": 3}, "did you mean 'accumulate'"),
        ({"method": "exat"}, "did you mean 'exact'"),
        ({"method": "half", "dtype": "fp8"}, "dtype='fp8' is not a choice"),
        ({"method": "torch:ddp", "rank": 3}, "takes no knobs"),
        ({"method": 3}, "method=3 is not a method"),
        ({"method": "exact+half"}, "two parts for the axis 'reducer'"),
    ],
)
def test_bad_arguments_of_prepare(arguments, words):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=words):
        paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


def test_nccl_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="nccl"):
        paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="nccl")


def test_what_cannot_be_trained():  # B54
    model = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="was not given an optimizer"):
        paceline.prepare(model)
    with pytest.raises(UsageError, match="was not given a model"):
        paceline.prepare(sgd)
    with pytest.raises(UsageError, match="cannot take a float"):
        paceline.prepare(model, sgd, 3.0)
    with pytest.raises(UsageError, match="in none of the models given"):
        paceline.prepare(torch.nn.Linear(2, 2), sgd)
    with pytest.raises(UsageError, match="LBFGS"):
        paceline.prepare(model, torch.optim.LBFGS(model.parameters()))
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter is trainable"):
        paceline.prepare(model, sgd)
    meta = torch.nn.Module()
    meta.weight = torch.nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(UsageError, match="weight is on the meta device"):
        paceline.prepare(meta, torch.optim.SGD(meta.parameters(), lr=0.1))


def test_the_exit_code_says_whose_fault_it_was(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, paceline\n"
        "model = torch.nn.Linear(2, 2)\n"
        "paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout=1)\n"
    )
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "workers [1] of 2 did not come" in done.stderr
