"""Several learners on one device: a small batch does not fill a GPU, so many small batches are learned from at once.

[Note: learners] k replicas of one model stand stacked in one tensor w [k, n], each with a batch of its own. One forward
and one backward go through all of them (torch.vmap: a product of matrices becomes a batch of products), and one update
over the stack is Crossbow's synchronous model averaging (syncs/sma.py has it across workers):

    cⱼ = α·(wⱼ − z);  vⱼ ← m·vⱼ + gⱼ;  wⱼ ← wⱼ − lr·vⱼ − cⱼ;  z' ← z + Σⱼ cⱼ + μ·(z − z_prev);  z_prev ← z;  z ← z'

With more workers than one, Σ is over the learners of all of them: the sum over the stack, then over the workers, on its
way while forward and backward compute. On a GPU the whole step is one CUDA graph.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.comm.environment import Environment
from paceline.comm.protocol import Comm
from paceline.comm.single import SingleComm
from paceline.errors import DataError, UsageError
from paceline.learners.convolution import Products
from paceline.session.session import current, open_session
from paceline.session.settings import Settings
from paceline.syncs._averaging import corrected_, largest_alpha, next_centre

_ALIGN = 16  # elements: matrix kernels like parameters that start on 64 bytes
_WINDOW = 30  # steps over which the tuner takes the time
_GAIN = 1.1  # twice the learners must bring this many times the samples/s, or their number is halved again

Loss = Callable[[Any, Tensor], Tensor]


class Learners:
    """k learners that train one model together.

        learners = paceline.Learners(model, loss_fn, lr=0.05, momentum=0.9, learners=16)
        for x, y in loader:                     # 16 × the batch of one learner
            loss = learners.step(x, y)          # the mean of the learners' losses, on the device
        with learners.evaluating() as model:    # the centre z is in the user's model
            ...

    The model's own parameters are read once, and written by `evaluating` and `write`. BatchNorm has averages for each
    learner, of which the centre gets the mean; dropout differs from learner to learner. A learner whose loss is not
    finite keeps its weights for that step and is counted in `left_out`.

    learners: how many, or "auto": their number doubles while that brings a tenth more samples/s, and then stays.
    batch: samples for one learner; if not given, the first batch's share. With "auto" it must be.
    lr: not scaled by the number of learners. `learners.lr = ...` changes it, for schedules.
    alpha: α; None: 1 over the number of all learners. mu: the centre's momentum.
    graph: capture the step in a CUDA graph; None: on a GPU.
    conv: "product": a convolution is a copy of its patches and a product of matrices, which stacks well; "grouped": one
        grouped convolution, which needs less memory. None: product on a GPU.
    comm: the other workers; None: those of this run, if there are any (each hands its own samples to `step`).
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        learners: int | Literal["auto"] = 4,
        batch: int | None = None,
        alpha: float | None = None,
        mu: float = 0.9,
        graph: bool | None = None,
        conv: Literal["product", "grouped"] | None = None,
        most: int = 64,
        comm: Comm | None = None,
    ) -> None:
        _check(learners=learners, batch=batch, lr=lr, momentum=momentum, weight_decay=weight_decay, mu=mu, conv=conv)
        self.model, self.loss_fn = model, loss_fn
        self.momentum, self.weight_decay, self.alpha, self.mu = momentum, weight_decay, alpha, mu
        self.batch, self.most = batch, most
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        self.device, self.dtype = _one_home(trained)
        _check_norms(model)
        self.conv = conv or ("product" if self.device.type == "cuda" else "grouped")
        self.graphed = self.device.type == "cuda" if graph is None else graph
        if self.graphed and self.device.type != "cuda":
            raise UsageError("graph=True, but the model is not on a GPU", do="move it there first, or leave graph out")
        self.comm = comm if comm is not None else _lane()
        self._places: dict[str, tuple[int, int, torch.Size]] = {}
        n = 0
        for name, p in trained.items():
            self._places[name] = (n, p.numel(), p.shape)
            n += -(-p.numel() // _ALIGN) * _ALIGN
        z = torch.zeros(n, device=self.device, dtype=self.dtype)
        for name, p in trained.items():
            self._view(z, name).copy_(p)
        self.z = self.comm.broadcast(z).wait()  # all workers start from worker 0's weights
        self.z_prev = self.z.clone()
        self.w, self.v = self.z[None].clone(), torch.zeros_like(self.z[None])
        self.buffers = {name: b.detach()[None].clone() for name, b in model.named_buffers()}
        self.left_out = torch.zeros((), dtype=torch.int64, device=self.device)
        self._lr = torch.tensor(float(lr), device=self.device, dtype=self.dtype)
        self._rest: tuple[Tensor, Tensor] | None = None
        self._tuning, self._best, self._count, self._began = learners == "auto", 0.0, 0, 0.0
        self._resize(1 if learners == "auto" else learners)

    # ------------------------------------------------------------------------------------------------ the stack

    @property
    def k(self) -> int:
        """How many learners there are on this device."""
        return len(self.w)

    @property
    def lr(self) -> float:
        return float(self._lr)

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr.fill_(value)

    def _view(self, flat: Tensor, name: str) -> Tensor:
        """A view of one parameter in a vector [n] or in a stack [k, n]."""
        start, numel, shape = self._places[name]
        return flat[..., start : start + numel].view(*flat.shape[:-1], *shape)

    def _resize(self, k: int) -> None:
        """Change the number of learners. New ones start from the centre, without velocity."""
        self._pull = _alpha(self.alpha, self.mu, k * self.comm.world_size)
        old = min(k, self.k)
        self.w, before = self.z.expand(k, -1).clone(), self.w
        self.w[:old] = before[:old]
        self.v, before = torch.zeros_like(self.w), self.v
        self.v[:old] = before[:old]
        first = {name: _mean(b) for name, b in self.buffers.items()}
        for name, b in self.buffers.items():
            self.buffers[name] = first[name].expand(k, *b.shape[1:]).clone()
            self.buffers[name][:old] = b[:old]
        self._leaves = {name: self._view(self.w, name).detach().requires_grad_() for name in self._places}
        self._velocities = [self._view(self.v, name) for name in self._places]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._count = 0

    # ------------------------------------------------------------------------------------------------ a step

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Learn from x and y, cut into one batch for each learner. The mean of their losses, on the device: nothing
        waits for it.

        Samples that do not make up a step of all learners wait for the next call; None if no step was made.
        """
        if len(x) != len(y):
            raise DataError(f"{len(x)} samples have {len(y)} labels")
        if self.batch is None:
            self.batch = len(x) // self.k
        if len(x) == 0 or len(x) % self.batch:
            raise DataError(
                f"{len(x)} samples cannot be cut into batches of {self.batch}",
                why="every learner has a batch of the same size",
                do="set drop_last=True in the loader, and a batch size of learners × batch",
            )
        if self._rest is not None:
            x, y = torch.cat([self._rest[0], x]), torch.cat([self._rest[1], y])
        loss = None
        while len(x) >= (take := self.k * self.batch):
            try:
                loss = self._step(x[:take].unflatten(0, (self.k, -1)), y[:take].unflatten(0, (self.k, -1)))
            except torch.cuda.OutOfMemoryError:
                if not self._tuning or self.k == 1:
                    raise
                self._stay(self.k // 2)
                continue
            x, y = x[take:], y[take:]
            self._tune()
        self._rest = (x.clone(), y.clone()) if len(x) else None
        return loss

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.graphed:
            return self._whole(x.to(self.device), y.to(self.device))
        if self._graph is None or self._x.shape != x.shape or self._x.dtype != x.dtype:
            self._capture(x, y)
        self._x.copy_(x, non_blocking=True)
        self._y.copy_(y, non_blocking=True)
        if self.comm.world_size == 1:
            self._graph.replay()  # type: ignore[union-attr]
        else:
            self._averaged(self._graph.replay)  # type: ignore[union-attr]
        return self._loss.clone()

    def _whole(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self._averaged(lambda: self._learn(x, y))
        return loss

    @torch.no_grad()
    def _averaged(self, learn: Callable[[], Any]) -> Any:
        """Learn, and move the centre by the corrections of the weights before it, whose sum travels meanwhile."""
        if self._pull == 0.0:  # a single learner is its own centre
            result = learn()
            self.z.copy_(self.w[0])
            return result
        arriving = self.comm.sum(self.w.sum(0))
        result = learn()
        differences = arriving.wait().sub_(self.z, alpha=self.k * self.comm.world_size)  # Σ wⱼ − K·z
        z = next_centre(self.z, self.z_prev, differences, self.mu, alpha=self._pull)
        self.z_prev.copy_(self.z)
        self.z.copy_(z)
        return result

    def _learn(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward through the stack, and every learner's own update."""
        with torch.enable_grad():
            losses = self._losses(x, y)
            grads = torch.autograd.grad(losses.sum(), list(self._leaves.values()), materialize_grads=True)
        bad = losses.detach().isfinite().logical_not()
        for g, v in zip(grads, self._velocities, strict=True):
            torch.add(g, v, alpha=self.momentum, out=v)
        if self.weight_decay:
            self.v.add_(self.w, alpha=self.weight_decay)
        self.v.masked_fill_(bad[:, None], 0.0)
        self.left_out.add_(bad.sum())
        if self._pull:
            corrected_(self.w, self.z, self._pull)
        self.w.addcmul_(self.v, self._lr, value=-1.0)
        return losses.detach().mean()

    def _losses(self, x: Tensor, y: Tensor) -> Tensor:
        def one(w: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            with Products() if self.conv == "product" else contextlib.nullcontext():
                return self.loss_fn(functional_call(self.model, (w, buffers), (x,)), y)

        try:
            losses = torch.vmap(one, randomness="different")(self._leaves, self.buffers, x, y)
        except (RuntimeError, ValueError) as error:
            if "vmap" not in str(error):
                raise
            raise UsageError(
                "this model cannot be stacked",
                why=str(error).splitlines()[0],
                do="keep .item(), branches on values and recurrent modules out of it, or train it without Learners",
            ) from error
        if losses.dim() != 1:
            raise UsageError(f"loss_fn gives {list(losses.shape[1:])}, not a number", do='use reduction="mean"')
        return losses

    def _capture(self, x: Tensor, y: Tensor) -> None:
        """The step as one CUDA graph; alone with the centre's part, which otherwise waits for the other workers."""
        self._x, self._y = (torch.empty(t.shape, dtype=t.dtype, device=self.device).copy_(t) for t in (x, y))
        work = self._whole if self.comm.world_size == 1 else torch.no_grad()(self._learn)
        mutable = [self.w, self.v, self.z, self.z_prev, self.left_out, *self.buffers.values()]
        before = [t.clone() for t in mutable]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(3):  # libraries choose their kernels and take their memory before the capture
                    work(self._x, self._y)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._loss = work(self._x, self._y)
        finally:
            torch._foreach_copy_(mutable, before)  # the steps made for warming up and capturing do not count
        self._graph = graph

    # ------------------------------------------------------------------------------------------------ how many

    def _tune(self) -> None:
        """After the first step of a new number (which captures), the time of a window; then twice as many, or back."""
        if not self._tuning:
            return
        self._count += 1
        if self._count == 1:
            self._began = self._now()
        if self._count <= _WINDOW:
            return
        assert self.batch is not None
        mine = self.k * self.batch * _WINDOW / (self._now() - self._began)
        # The mean over the workers, so that all of them decide alike.
        speed = float(self.comm.mean(torch.tensor([mine], dtype=torch.float64)).wait())
        if speed < _GAIN * self._best:
            self._stay(self.k // 2)
        elif 2 * self.k > self.most:
            self._stay(self.k)
        else:
            self._best = speed
            self._resize(2 * self.k)

    def _stay(self, k: int) -> None:
        self._tuning = False
        if k != self.k:
            self._resize(k)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    # ------------------------------------------------------------------------------------------------ the centre

    @torch.no_grad()
    def centre(self) -> dict[str, Tensor]:
        """The weights to evaluate and save, and the buffers, by name. Every worker must call it."""
        averages = {name: _mean(b) for name, b in self.buffers.items()}
        averages = {n: self.comm.mean(b).wait() if b.is_floating_point() else b for n, b in averages.items()}
        return {name: self._view(self.z, name).clone() for name in self._places} | averages

    @torch.no_grad()
    def write(self) -> nn.Module:
        """Copy the centre into the user's model, and return it."""
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, value in self.centre().items():
            own[name].copy_(value)
        if count := int(self.left_out):
            self.left_out.zero_()
            warnings.warn(f"paceline: the loss of a learner was not finite {count} times; left out", stacklevel=2)
        return self.model

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Inside the block the user's model has the centre's weights and is in eval mode."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.write().eval()
        try:
            yield self.model
        finally:
            for module, training in modes:
                module.training = training

    @torch.no_grad()
    def restart(self) -> None:
        """Start all learners again from the centre, at rest: for a new learning rate, or when accuracy has stalled."""
        self.w.copy_(self.z.expand_as(self.w))
        self.v.zero_()
        self.z_prev.copy_(self.z)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, except samples that wait for the next step. Every worker has its own."""
        tensors = {"w": self.w, "v": self.v, "z": self.z, "z_prev": self.z_prev, "lr": self._lr}
        tensors |= {f"buffer {name}": b for name, b in self.buffers.items()}
        return {name: t.clone() for name, t in tensors.items()} | {"batch": self.batch, "tuning": self._tuning}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["z"].shape != self.z.shape:
            raise DataError("this state is of another model", why=f"{state['z'].numel()} weights, not {len(self.z)}")
        self.batch, self._tuning = state["batch"], state["tuning"]
        self._resize(len(state["w"]))
        for name, t in (("w", self.w), ("v", self.v), ("z", self.z), ("z_prev", self.z_prev), ("lr", self._lr)):
            t.copy_(state[name])
        for name, b in self.buffers.items():
            b.copy_(state[f"buffer {name}"])


# ---------------------------------------------------------------------------------------------------- checks


def _mean(stacked: Tensor) -> Tensor:
    """The mean of the learners' buffers; one that does not hold real numbers is the same in all of them."""
    return stacked.mean(0) if stacked.is_floating_point() else stacked[0].clone()


def _alpha(asked: float | None, mu: float, count: int) -> float:
    """α for so many learners, 0 for a single one; refused beyond the bound of `largest_alpha`."""
    most = largest_alpha(count, mu)
    alpha = 1 / count if asked is None else asked
    if not 0.0 < alpha < most:
        raise UsageError(
            f"alpha={alpha:g} does not do for {count} learners", do=f"choose alpha above 0, below {most:.3g}"
        )
    return alpha if count > 1 else 0.0


def _check(*, learners: Any, conv: str | None, batch: int | None, **numbers: float) -> None:
    if learners != "auto" and (not isinstance(learners, int) or isinstance(learners, bool) or learners < 1):
        raise UsageError(f"learners={learners!r} is not a number of learners", do='give one from 1 on, or "auto"')
    if batch is None and learners == "auto":
        raise UsageError(
            'learners="auto" needs batch=', why="the number of learners changes, the batch of one does not"
        )
    if batch is not None and batch < 1:
        raise UsageError(f"batch={batch} is not a batch size")
    if conv not in ("product", "grouped", None):
        raise UsageError(f"conv={conv!r} is not a way to convolve", do="choose product or grouped")
    for name, value in numbers.items():
        if not (0.0 <= value < (1.0 if name in ("momentum", "mu") else float("inf"))) or (
            name == "lr" and value == 0.0
        ):
            raise UsageError(f"{name}={value!r} is out of range")


def _one_home(trained: dict[str, Tensor]) -> tuple[torch.device, torch.dtype]:
    if not trained:
        raise UsageError("nothing in this model is trained")
    first, home = next(iter(trained.items()))
    for name, p in trained.items():
        if p.dtype != home.dtype or p.device != home.device or not p.is_floating_point():
            raise UsageError(
                f"{name} is {p.dtype} on {p.device}, {first} is {home.dtype} on {home.device}",
                why="all learners' weights stand in one tensor of real numbers",
                do="give the model one dtype and one device",
            )
    return home.device, home.dtype


def _check_norms(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.modules.batchnorm._BatchNorm)
            and module.momentum is None
            and module.running_mean is not None
        ):
            raise UsageError(
                f"{name}: BatchNorm with momentum=None cannot be stacked",
                why="it reads its own count of batches, which is a number for each learner",
                do="give it a momentum, or use GroupNorm",
            )


def _lane() -> Comm:
    """A lane to the other workers, in the session that `prepare` opened or in one opened here."""
    env = Environment.read()
    session = open_session(env, Settings()) if env.world_size > 1 else current()
    return SingleComm() if session is None else session.group.lane(f"learners {len(session.group.lanes)}")
