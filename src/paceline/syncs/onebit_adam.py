"""Workers average the momentum instead of the gradients, once the variance is frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.facts import Fact
from paceline.core.parts import Part, Sync
from paceline.knobs import knob
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange

FROZEN = "frozen"  # a key in the optimizer's state of a parameter whose warm-up is over; saved with its moments


@register
@dataclass(kw_only=True)
class OneBitAdam(Sync):
    """Adam on the exact mean at first; then its variance v is frozen, and the workers average its momentum m.

    Compressed gradients would spoil v, which is not linear in them; m is linear. After the warm-up each worker forms
    mᵢ = β₁·m + (1−β₁)·gᵢ, the reducer estimates M = mean(mᵢ), and p.grad becomes ĝ = (M − β₁·m)/(1−β₁), in gradient
    units, so that clipping and loss scalers keep their meaning. The step is Adam's with m = β₁·m + (1−β₁)·ĝ, and
    both bias corrections go on with the step.

    The warm-up of each parameter is counted by its own updates: a parameter that is added, thawed or first used later
    has a later warm-up, and its bucket is averaged exactly until that is over. An element that had no gradient in all
    of its warm-up (v = 0) is not changed afterwards: noise divided by a variance of zero could be any number. With a
    world_size of 1 nothing is exchanged, and this is plain Adam throughout.
    """

    name: ClassVar[str] = "onebit_adam"
    paper: ClassVar[str] = "Tang et al., 1-bit Adam, ICML 2021"
    formula: ClassVar[str] = "2·n·s·(W−1)/W in the warm-up, then as the reducer"
    # KEEPS_LEFTOVERS: m is in true units, without the loss scale.
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.REPLICAS_AGREE, Fact.KEEPS_LEFTOVERS})
    needs: ClassVar[dict[Fact, str]] = {
        Fact.ADAM: "it steps by Adam's rule; use torch.optim.Adam or AdamW with amsgrad=False",
        Fact.WHOLE_GRADIENTS: "every worker needs the whole momentum; use the layout replicated",
    }

    warmup: int = knob(100, "updates by plain Adam; too few, and the frozen variance is noise", unit="steps", low=1)

    def recipe(self) -> dict[str, Part]:
        from paceline.reducers.error_feedback import ErrorFeedback
        from paceline.reducers.sign import Sign

        return {"sync": self, "reducer": ErrorFeedback(of=Sign())}

    async def on_grad(self, b: Bucket, ex: Exchange) -> None:
        state = ex.optimizer.state
        slots = [s for s in b.slots if s.param.requires_grad]
        if not all(FROZEN in state.get(s.param, ()) for s in slots):
            await ex.exact(b.flat)
            return
        g, beta = [s.view for s in slots], _beta(ex.optimizer, [s.param for s in slots])
        m = torch._foreach_mul([state[s.param]["exp_avg"] for s in slots], beta)
        rest = [1 - abs(x) for x in beta]
        torch._foreach_mul_(g, rest)
        torch._foreach_add_(g, m)
        b.flat.copy_(await ex.mean(b, b.flat))
        torch._foreach_sub_(g, m)
        torch._foreach_div_(g, rest)

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        state = ex.optimizer.state
        used = [p for group in ex.optimizer.param_groups for p in group["params"] if p.grad is not None]
        frozen = {p: p.grad for p in used if FROZEN in state.get(p, ())}
        warm = [p for p in used if p not in frozen]
        result = None
        if warm or not frozen:
            for p in frozen:
                p.grad = None  # so that the optimizer skips it
            result = step()
            for p, grad in frozen.items():
                p.grad = grad
        if frozen:
            Optimizer.profile_hook_step(_update)(ex.optimizer)  # runs the user's step hooks too, as its own step does
        for p in warm:
            if state[p]["step"] >= self.warmup:
                state[p][FROZEN] = True
        return result


def _beta(optimizer: Optimizer, params: list[Tensor]) -> list[float]:
    """The β₁ of each parameter; negative if Adam maximizes, because there m is the mean of −g."""
    of = {p: group for group in optimizer.param_groups for p in group["params"]}
    return [float(of[p]["betas"][0]) * (-1 if of[p]["maximize"] else 1) for p in params]


@torch.no_grad()
def _update(optimizer: Optimizer) -> None:
    """Adam's step for the frozen parameters, without the update of v."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if found_inf is not None and found_inf > 0:  # with a fused optimizer, a GradScaler leaves this check to its step
        return
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if p.grad is not None and FROZEN in optimizer.state.get(p, ())]
        if not params:
            continue
        states = [optimizer.state[p] for p in params]
        steps = [s["step"] for s in states]
        torch._foreach_add_(steps, 1)
        t = torch.stack(steps).tolist()
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        g = _real([p.grad for p in params])
        m, v, x = _real([s["exp_avg"] for s in states]), _real([s["exp_avg_sq"] for s in states]), _real(params)
        if scale is not None:
            g = [y / scale for y in g]
        if group["maximize"]:
            g = list(torch._foreach_neg(g))
        if group["weight_decay"] and group["decoupled_weight_decay"]:
            torch._foreach_mul_(x, 1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            g = list(torch._foreach_add(g, x, alpha=group["weight_decay"]))
        torch._foreach_lerp_(m, g, 1 - beta1)
        root = torch._foreach_sqrt(v)
        torch._foreach_div_(root, [(1 - beta2**n) ** 0.5 for n in t])
        torch._foreach_add_(root, group["eps"])
        for r, variance in zip(root, v, strict=True):
            r.masked_fill_(variance == 0, torch.inf)
        torch._foreach_addcdiv_(x, m, root, [-lr / (1 - beta1**n) for n in t])


def _real(tensors: list[Any]) -> list[Tensor]:
    return [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
