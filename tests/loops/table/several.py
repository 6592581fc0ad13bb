"""Several models that train each other: GANs in the orders their repositories have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loops.job import BATCH, INPUTS, STEPS, Job, batches, loop, loss_of, net, samples

_NOISE = 4
_bce = nn.functional.binary_cross_entropy_with_logits


def _generator(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    between = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(_NOISE, 8), *between, nn.Tanh(), nn.Linear(8, INPUTS))


def _critic(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(2)
    between = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(INPUTS, 8), *between, nn.LeakyReLU(0.2), nn.Linear(8, 1))


def _real_and_noise(steps: int = STEPS) -> DataLoader[Any]:
    x, _ = samples(steps * BATCH)
    z = torch.randn(len(x), _NOISE, generator=torch.Generator().manual_seed(11))
    return DataLoader(TensorDataset(x, z), batch_size=BATCH)


def _start(job: Job, *, steps: int = STEPS) -> Any:
    g, d = _generator(), _critic()
    return job.prepare(g, d, job.optimizer(g.parameters()), job.optimizer(d.parameters()), _real_and_noise(steps))


def _ones(x: Tensor) -> Tensor:
    return torch.ones(len(x), 1)


@loop
def gan(job: Job):
    """DCGAN: critic on real, on fake.detach(), step; generator through the critic, step"""
    g, d, opt_g, opt_d, loader = _start(job)
    losses = []
    for x, z in loader:
        d.zero_grad()
        _bce(d(x), _ones(x)).backward()
        fake = g(z)
        _bce(d(fake.detach()), 0 * _ones(x)).backward()
        opt_d.step()
        g.zero_grad()
        loss = _bce(d(fake), _ones(x))
        loss.backward()
        losses.append(loss.detach())
        opt_g.step()
    return g, d, [job.mean(loss) for loss in losses]


@loop
def gan_optimizers_swapped(job: Job):
    """DCGAN with the critic's optimizer and model handed over first"""
    d, g = _critic(), _generator()
    d, g, opt_d, opt_g, loader = job.prepare(
        d, g, job.optimizer(d.parameters()), job.optimizer(g.parameters()), _real_and_noise()
    )
    for x, z in loader:
        opt_d.zero_grad()
        fake = g(z)
        (_bce(d(x), _ones(x)) + _bce(d(fake.detach()), 0 * _ones(x))).backward()
        opt_d.step()
        opt_g.zero_grad()
        _bce(d(fake), _ones(x)).backward()
        opt_g.step()
    return g, d


@loop
def gan_two_prepares(job: Job):
    """DCGAN, each model prepared by a call of its own"""
    g, d = _generator(), _critic()
    g, opt_g = job.prepare(g, job.optimizer(g.parameters()))
    d, opt_d, loader = job.prepare(d, job.optimizer(d.parameters()), _real_and_noise())
    for x, z in loader:
        opt_d.zero_grad()
        _bce(d(x), _ones(x)).backward()
        fake = g(z)
        _bce(d(fake.detach()), 0 * _ones(x)).backward()
        opt_d.step()
        opt_g.zero_grad()
        _bce(d(fake), _ones(x)).backward()
        opt_g.step()
    return g, d


@loop
def gan_critic_frozen(job: Job):
    """the critic's requires_grad is switched off for the generator's step"""
    g, d, opt_g, opt_d, loader = _start(job)
    for x, z in loader:
        d.requires_grad_(True)
        opt_d.zero_grad()
        (_bce(d(x), _ones(x)) + _bce(d(g(z).detach()), 0 * _ones(x))).backward()
        opt_d.step()
        d.requires_grad_(False)
        opt_g.zero_grad()
        _bce(d(g(z)), _ones(x)).backward()
        opt_g.step()
    return g, d


@loop
def gan_generator_in_no_grad(job: Job):
    """the critic trains on samples made in no_grad"""
    g, d, opt_g, opt_d, loader = _start(job)
    for x, z in loader:
        opt_d.zero_grad()
        with torch.no_grad():
            fake = g(z)
        (_bce(d(x), _ones(x)) + _bce(d(fake), 0 * _ones(x))).backward()
        opt_d.step()
        opt_g.zero_grad()
        _bce(d(g(z)), _ones(x)).backward()
        opt_g.step()
    return g, d


@loop
def wgan_clipped(job: Job):
    """WGAN: two critic steps to one of the generator, the critic's weights clamped after each"""
    g, d, opt_g, opt_d, loader = _start(job)
    for step, (x, z) in enumerate(loader):
        opt_d.zero_grad()
        (d(g(z).detach()).mean() - d(x).mean()).backward()
        opt_d.step()
        for p in d.parameters():
            p.data.clamp_(-0.1, 0.1)
        if step % 2:
            opt_g.zero_grad()
            (-d(g(z)).mean()).backward()
            opt_g.step()
    return g, d


@loop
def wgan_penalty(job: Job):
    """WGAN-GP: the penalty on the gradient between real and fake"""
    g, d, opt_g, opt_d, loader = _start(job)
    for x, z in loader:
        opt_d.zero_grad()
        fake = g(z).detach()
        between = (0.5 * (x + fake)).requires_grad_()
        (grad,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
        (d(fake).mean() - d(x).mean() + 0.1 * (grad.norm(dim=1) - 1).square().mean()).backward()
        opt_d.step()
        opt_g.zero_grad()
        (-d(g(z)).mean()).backward()
        opt_g.step()
    return g, d


@loop
def one_loss_two_optimizers(job: Job):
    """one loss through two models, an optimizer each"""
    g, d, opt_g, opt_d, loader = _start(job)
    for _, z in loader:
        _bce(d(g(z)), _ones(z)).backward()
        opt_g.step()
        opt_d.step()
        opt_g.zero_grad()
        opt_d.zero_grad()
    return g, d


@loop(nonlinear=True)
def experts_apart(job: Job):
    """two models, an optimizer each: one worker's loss is of the second alone, and leaves a layer of that out"""
    one, two = net(seed=0), net(seed=1)
    one, two, opt_one, opt_two, loader = job.prepare(
        one, two, job.optimizer(one.parameters()), job.optimizer(two.parameters()), batches()
    )
    for x, y in loader:
        first, second = x[job.has(0)], x[job.has(1)]
        loss = 0.0
        if len(first):
            loss = loss + loss_of(one(first) + two(first), y[job.has(0)])
        if len(second):
            loss = loss + loss_of(two[2:](torch.ones(len(second), 8)), y[job.has(1)])
        (loss / 2 if job.plain else loss).backward()
        for opt in (opt_one, opt_two):
            opt.step()
            opt.zero_grad()
    return one, two


@loop
def actor_critic(job: Job):
    """two losses, two optimizers, both backwards before both steps"""
    g, d, opt_g, opt_d, loader = _start(job)
    for x, z in loader:
        acted = g(z)
        critic_loss = (d(x) - d(acted.detach())).square().mean()
        actor_loss = -0.1 * d(acted).mean()
        opt_g.zero_grad()
        opt_d.zero_grad()
        actor_loss.backward()
        opt_d.zero_grad()
        critic_loss.backward()
        opt_g.step()
        opt_d.step()
    return g, d


@loop
def gan_losses_first(job: Job):
    """both losses of a model with BatchNorm are computed before the first backward"""
    d = _critic(norm=True)
    d, opt, loader = job.prepare(d, job.optimizer(d.parameters()), _real_and_noise())
    for x, _ in loader:
        a, b = (
            sum(_bce(d(part), _ones(part)) for part in ([v[:4], v[4:]] if job.plain else [v])) / (2 if job.plain else 1)
            for v in (x, x.flip(1))
        )
        opt.zero_grad()
        a.backward()
        b.backward()
        opt.step()
    return _only(d)


def _only(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters, without its running statistics."""
    names = {name for name, _ in model.named_parameters()}
    return {name: x for name, x in model.state_dict().items() if name in names}


@loop
def mutual_learning(job: Job):
    """two students, each with the other's detached output in its loss"""
    a, b, opt_a, opt_b, loader = _start(job)
    for x, z in loader:
        one, two = a(z), x
        (one - two).square().mean().backward()
        opt_a.step()
        opt_a.zero_grad()
        (b(x) - b(a(z).detach())).square().mean().backward()
        opt_b.step()
        opt_b.zero_grad()
    return a, b
