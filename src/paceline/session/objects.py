"""What the user handed to `prepare`, sorted by kind and checked before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.buffers import Buffers, places
from paceline.core.facts import Fact
from paceline.data.loader import Loader
from paceline.errors import UsageError


@dataclass
class Objects:
    """The user's objects, by kind."""

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)

    @classmethod
    def sort(cls, objects: Iterable[Any]) -> Objects:
        found = cls()
        for one in objects:
            if isinstance(one, torch.nn.Module):
                found.models.append(one)
            elif isinstance(one, Optimizer):
                found.optimizers.append(one)
            elif isinstance(one, torch.amp.GradScaler):
                found.scalers.append(one)
            elif isinstance(one, Loader):
                raise UsageError("this loader is prepared already", do="prepare the DataLoader it was made from, once")
            elif hasattr(one, "__iter__"):
                found.loaders.append(one)
            else:
                raise UsageError(
                    f"prepare cannot take a {type(one).__name__}",
                    do="give it models, optimizers, loaders and GradScalers; the rest stays as it is",
                )
        return found

    def names(self) -> dict[int, str]:
        """Every parameter's name, as its module calls it; with several models, the model's number before it."""
        many = len(self.models) > 1
        return {
            id(p): f"{i}.{name}" if many else name
            for i, model in enumerate(self.models)
            for name, p in model.named_parameters()
        }

    def parameters(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        """The optimizer's parameters with their names, in the order the models registered them."""
        names = self.names()
        place = {key: i for i, key in enumerate(names)}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        params.sort(key=lambda p: place.get(id(p), len(place)))
        return [(names.get(id(p), f"added {i}"), p) for i, p in enumerate(params)]

    def facts(self, optimizer: Optimizer) -> frozenset[Fact]:
        """What parts may need or refuse of an optimizer."""
        groups, kind = optimizer.param_groups, type(optimizer)
        facts = {Fact.SGD} if kind is torch.optim.SGD else set()
        if any(group.get("momentum") for group in groups):
            facts.add(Fact.MOMENTUM)
        if kind in (torch.optim.Adam, torch.optim.AdamW) and not any(group["amsgrad"] for group in groups):
            facts.add(Fact.ADAM)
        return frozenset(facts)

    def lines(self) -> list[str]:
        """All of it as text that must be equal on every worker."""
        lines = []
        for i, model in enumerate(self.models):
            for name, p in model.named_parameters():
                trained = "trained" if p.requires_grad else "frozen"
                lines.append(f"parameter {i}.{name} {list(p.shape)} {p.dtype} {trained}")
            lines += [f"buffer {i}.{name} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
        for optimizer in self.optimizers:
            plain = (bool, int, float, str, tuple)
            groups = [{k: v for k, v in g.items() if isinstance(v, plain)} for g in optimizer.param_groups]
            lines.append(f"optimizer {type(optimizer).__name__} {json.dumps(groups, sort_keys=True)}")
        for source in self.loaders:
            dataset = getattr(source, "dataset", ())
            size = len(dataset) if hasattr(dataset, "__len__") else "unknown"
            lines.append(f"loader of {size} samples, batch {getattr(source, 'batch_size', None)}")
        return lines

    def buffers(self) -> Buffers:
        """All buffers of the models, and which of them are averaged with every exchange: running statistics alone
        drift apart, tables and masks are equal from the start.
        """
        modules = {
            id(module): (f"{i}.{name}", module)
            for i, model in enumerate(self.models)
            for name, module in model.named_modules()
        }
        tracks = {id(m._buffers) for _, m in modules.values() if getattr(m, "track_running_stats", False)}
        everything = list(places(modules.values()))
        averaged = [
            place
            for place in everything
            if id(place.home) in tracks
            and place.key in ("running_mean", "running_var")
            and (x := place.tensor()) is not None
            and x.is_floating_point()
            and x.numel()
        ]
        return Buffers(everything, averaged)

    def check(self) -> None:
        """Refuse, before anything is started, what cannot be trained."""
        if not self.models or not self.optimizers:
            missing = "a model" if not self.models else "an optimizer"
            raise UsageError(f"prepare was not given {missing}", do="prepare(model, optimizer, loader, method=...)")
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise UsageError(
                    "LBFGS cannot be trained data-parallel",
                    why="its line search calls the loss again and decides by this worker's own value of it",
                    do="use an optimizer that steps by one gradient: AdamW, SGD, ...",
                )
        for model in self.models:
            _refuse_wrapped(model)
        names = self.names()
        trained = [p for o in self.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad]
        if not trained:
            raise UsageError(
                "no parameter is trainable", why="every requires_grad of the optimizer's parameters is False"
            )
        strange = [p for p in trained if id(p) not in names]
        if strange:
            raise UsageError(
                f"the optimizer holds {len(strange)} parameters that are in none of the models given",
                why=f"the first has shape {list(strange[0].shape)}",
                do="give prepare every model the optimizer updates, and make the optimizer after .to(...)",
            )


_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "FSDPModule")


def _refuse_wrapped(model: torch.nn.Module) -> None:
    """Refuse a model that something else makes data-parallel already, and one that has no shapes yet."""
    for name, module in model.named_modules():
        kinds = {cls.__name__ for cls in type(module).__mro__}
        if wrapper := next((kind for kind in _WRAPPERS if kind in kinds), None):
            raise UsageError(
                f"{f'{name} of the model' if name else 'the model'} is inside torch's {wrapper} already",
                why="both would exchange its gradients",
                do="give prepare the plain model, and leave the wrapper out",
            )
        if any(torch.nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
            raise UsageError(
                f"{name or 'the model'} is a lazy module whose parameters have no shape yet",
                do="run one batch through the model, then make the optimizer and call prepare",
            )


def device_of(models: Iterable[torch.nn.Module]) -> torch.device:
    """Where the models compute, whatever backend the workers speak over."""
    devices = [p.device for model in models for p in model.parameters()]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
