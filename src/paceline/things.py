"""What the user handed to `prepare`, sorted by kind and checked before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.loader import Loader


@dataclass
class Things:
    """The user's objects, by kind."""

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)

    @classmethod
    def sort(cls, objects: Iterable[Any]) -> Things:
        things = cls()
        for thing in objects:
            if isinstance(thing, torch.nn.Module):
                things.models.append(thing)
            elif isinstance(thing, Optimizer):
                things.optimizers.append(thing)
            elif isinstance(thing, torch.amp.GradScaler):
                things.scalers.append(thing)
            elif isinstance(thing, Loader):
                raise UsageError("this loader is prepared already", do="prepare the DataLoader it was made from, once")
            elif hasattr(thing, "__iter__"):
                things.loaders.append(thing)
            else:
                raise UsageError(
                    f"prepare cannot take a {type(thing).__name__}",
                    do="give it models, optimizers, loaders and GradScalers; the rest stays as it is",
                )
        return things

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

    def facts(self, optimizer: Optimizer) -> frozenset[str]:
        """What parts may need or refuse: `optimizer:SGD`, `optimizer:momentum`, `optimizer:adam`."""
        groups, kind = optimizer.param_groups, type(optimizer)
        facts = {f"optimizer:{kind.__name__}"}
        if any(group.get("momentum") for group in groups):
            facts.add("optimizer:momentum")
        if kind in (torch.optim.Adam, torch.optim.AdamW) and not any(group["amsgrad"] for group in groups):
            facts.add("optimizer:adam")
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

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Floating-point buffers, which are averaged with every exchange."""
        return [
            (f"{i}.{name}", b)
            for i, model in enumerate(self.models)
            for name, b in model.named_buffers()
            if b.is_floating_point() and b.numel() and name.rpartition(".")[2] in _statistics(model, name)
        ]

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
                )
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


def _statistics(model: torch.nn.Module, name: str) -> tuple[str, ...]:
    """Only running statistics drift apart; tables and masks are equal from the start."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return ("running_mean", "running_var") if getattr(owner, "track_running_stats", False) else ()
