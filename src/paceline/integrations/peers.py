"""What torch itself ships for the same job, behind one call, so that a race compares like with like.

Each is set up as its documentation says, on the default process group and gloo; what had to differ says
why. A peer is not a method of ours: the engine never sees it, so only its clock, its losses and its
interface are measured.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.comm.rendezvous import Rendezvous
from paceline.errors import MethodError, UsageError, nearest

# torch.distributed.fsdp and .optim are imported where they are used: they take a second, and whoever imports
# paceline comes through here.

PEERS = {
    "floor": "no communication at all: every worker trains alone, so nothing can be faster",
    "torch:ddp": "torch's DistributedDataParallel as it comes",
    "torch:fp16": "DDP with the fp16_compress hook",
    "torch:powersgd": "DDP with the PowerSGD hook, rank 2 from step 2 on, one bucket",
    "torch:local_sgd": "DDP for 2 steps, then local steps and the mean of the weights every 8",
    "torch:fsdp2": "fully_shard: weights, gradients and optimizer state split over the workers",
    "torch:zero1": "DDP with ZeroRedundancyOptimizer: optimizer state split over the workers",
}

LOCAL_WARMUP, LOCAL_PERIOD = 2, 8
POWERSGD_RANK, POWERSGD_START = (
    2,
    2,
)  # torch refuses to start before step 2: DDP changes its buckets after step 1

Pair = tuple[nn.Module, Optimizer]


def prepare_peer(name: str, model: nn.Module, optimizer: Optimizer, rendezvous: Rendezvous | None = None) -> Pair:
    """The model and the optimizer as the peer wants them. rendezvous: where its workers meet, if not met already."""
    if name not in PEERS:
        raise MethodError(f"there is no peer {name!r}", do=nearest(name, PEERS))
    if name == "floor":
        return model, optimizer
    transport = rendezvous.transport if rendezvous is not None else None
    if rendezvous is not None and transport is not None and not dist.is_initialized():
        dist.init_process_group(
            rendezvous.backend,
            store=transport.torch_store("group"),
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            timeout=datetime.timedelta(seconds=transport.timeout_s),
        )
        atexit.register(_leave)
    if not dist.is_initialized():
        raise UsageError(
            f"{name} needs a group of workers",
            why="it is torch's own data parallelism, which has no world of one",
            do="start the script with `paceline run --workers N` or `paceline race`",
        )
    return _PREPARE[name](model, optimizer)


def _leave() -> None:
    """At exit, if the workers are still connected."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _ddp(model: nn.Module, optimizer: Optimizer) -> Pair:
    return DistributedDataParallel(model), optimizer


def _fp16(model: nn.Module, optimizer: Optimizer) -> Pair:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped, optimizer


def _powersgd(model: nn.Module, optimizer: Optimizer) -> Pair:
    # The hook blocks inside a callback of the first bucket's all-reduce; on gloo the second bucket then waits for
    # the thread that is blocked. With a single bucket there is no second one.
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    wrapped = DistributedDataParallel(model, bucket_cap_mb=size // 2**20 + 1)
    state = PowerSGDState(
        process_group=None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
    )
    wrapped.register_comm_hook(state, powerSGD_hook)
    return wrapped, optimizer


def _local_sgd(model: nn.Module, optimizer: Optimizer) -> Pair:
    from torch.distributed.optim import PostLocalSGDOptimizer

    wrapped = DistributedDataParallel(model)
    # No gradients travel after the warm-up. torch's default would still average them inside each host, which on
    # one machine is everybody.
    state = PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=LOCAL_WARMUP,
        post_local_gradient_allreduce=False,
    )
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=LOCAL_PERIOD, warmup_steps=LOCAL_WARMUP)
    return wrapped, PostLocalSGDOptimizer(optim=optimizer, averager=averager)


def _fsdp2(model: nn.Module, optimizer: Optimizer) -> Pair:
    from torch.distributed.fsdp import fully_shard

    names = {id(p): name for name, p in model.named_parameters()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # A list of modules is how blocks of layers are written. Each block is gathered when it is needed; what is
    # left belongs to the whole model. Children come before the modules that hold them.
    for module in reversed(list(model.modules())):
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = dict(model.named_parameters())
    return model, type(optimizer)(
        _groups(optimizer, lambda p: sharded[names[id(p)]] if id(p) in names else p), **_settings(optimizer)
    )


def _zero1(model: nn.Module, optimizer: Optimizer) -> Pair:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    groups = _groups(optimizer, lambda p: p)
    return DistributedDataParallel(model), ZeroRedundancyOptimizer(
        groups, optimizer_class=type(optimizer), **_settings(optimizer)
    )


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer was made with. AdamW's defaults hold a word its own constructor does not take."""
    known = inspect.signature(type(optimizer).__init__).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in known}


def _groups(optimizer: Optimizer, new: Callable[[Tensor], Tensor]) -> Iterable[dict[str, Any]]:
    return [{**group, "params": [new(p) for p in group["params"]]} for group in optimizer.param_groups]


_PREPARE: dict[str, Callable[[nn.Module, Optimizer], Pair]] = {
    "torch:ddp": _ddp,
    "torch:fp16": _fp16,
    "torch:powersgd": _powersgd,
    "torch:local_sgd": _local_sgd,
    "torch:fsdp2": _fsdp2,
    "torch:zero1": _zero1,
}
