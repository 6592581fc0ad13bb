"""What a script calls beside the loop, between real processes; and a process group of its own handed to `prepare`."""

from __future__ import annotations

import pytest
import torch

import paceline
import processes
from marks import slow
from rig import alone, close, data, mlp, sgd, weights


def _collectives(rank):
    model = mlp()
    paceline.prepare(model, sgd(model))
    paceline.barrier()
    tree = {"epoch": rank, "x": torch.full((2, 2), float(rank)), "names": ["a", ("b", rank)]}
    told = paceline.broadcast(tree, root=1)
    gathered = paceline.all_gather(torch.tensor([rank, 10 * rank]))
    words = paceline.all_gather({"rank": rank, "text": "x" * rank})
    with pytest.raises(paceline.UsageError, match="root=7 is not a worker"):
        paceline.broadcast(1, root=7)
    mean = paceline.mean(float(rank))
    return told["epoch"], told["x"], told["names"], gathered, words, mean, paceline.is_main(), str(paceline.device())


def test_collectives_of_a_script():
    for rank, (epoch, x, names, gathered, words, mean, main, device) in enumerate(
        processes.values(processes.run(3, _collectives))
    ):
        assert epoch == 1
        assert names == ["a", ("b", 1)]
        assert torch.equal(x, torch.ones(2, 2))
        assert gathered.tolist() == [[0, 0], [1, 10], [2, 20]]
        assert words == [{"rank": r, "text": "x" * r} for r in range(3)]
        assert float(mean) == 1.0
        assert main == (rank == 0)
        assert device == "cpu"


def _differ(rank):
    model = mlp()
    paceline.prepare(model, sgd(model))
    return paceline.all_gather(torch.ones(2 + rank))


def test_operations_that_differ_are_named():
    for outcome in processes.run(2, _differ):
        assert outcome.error == "MismatchError"
        assert "all_gather of float32" in outcome.message


def _twice(rank):
    ends = []
    for _ in range(2):
        model = mlp()
        optimizer = sgd(model)
        model, optimizer = paceline.prepare(model, optimizer)
        for x, y in data(3):
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights(model))
        paceline.shutdown()
    return ends


def test_after_a_shutdown_prepare_starts_anew():
    for first, second in processes.values(processes.run(2, _twice)):
        assert torch.equal(first, second)


def test_print_is_worker_zeros(capsys, monkeypatch):
    paceline.print("one", "two", sep="-")
    monkeypatch.setenv("RANK", "1")
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    paceline.print("not this")
    assert capsys.readouterr().out == "one-two\n"


def _in_groups(rank, mesh):
    """Four processes, two groups of data parallelism: {0, 2} and {1, 3}."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if mesh:
        axes = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        group = axes["data"]
    else:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = pairs[rank % 2]
    model = mlp(rank % 2)
    optimizer = sgd(model)
    model, optimizer = paceline.prepare(model, optimizer, group=group, bucket_mb=0.0005)
    assert (paceline.rank(), paceline.world_size()) == (rank // 2, 2)
    for x, y in data(6):
        mine = slice(6 * paceline.rank(), 6 * paceline.rank() + 6)
        torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = weights(model)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)  # the script's own groups are as they were
    return ours, float(x)


@pytest.mark.parametrize("mesh", [slow(False), True])
def test_a_process_group_of_ones_own(mesh):
    results = processes.values(processes.run(4, _in_groups, mesh))
    assert all(total == 6.0 for _, total in results)
    assert torch.equal(results[0][0], results[2][0])
    assert torch.equal(results[1][0], results[3][0])
    assert not torch.equal(results[0][0], results[1][0])
    close(results[0][0], alone(data(6)))
