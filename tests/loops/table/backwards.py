"""Which backwards make a step: several, parts of one, none, those through other backwards."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loops.job import Job, batches, loop, loss_of, net


@loop
def two_backwards(job: Job):
    """two losses of one forward, a backward each, retain_graph"""
    model, opt, loader = job.start()
    for x, y in loader:
        out = model(x)
        loss_of(out, y).backward(retain_graph=True)
        (0.1 * out.square().mean()).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def two_forwards_two_backwards(job: Job):
    """forward, backward, forward, backward, step"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        (0.1 * model(x + 1).square().mean()).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def two_forwards_then_backwards(job: Job):
    """both forwards first, then both backwards"""
    model, opt, loader = job.start()
    for x, y in loader:
        a, b = loss_of(model(x), y), 0.1 * model(x + 1).square().mean()
        b.backward()
        a.backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def backwards_of_parts(job: Job):
    """the second backward reaches only the first layers"""
    model, opt, loader = job.start()
    for x, y in loader:
        hidden = model[:2](x)
        loss_of(model[2:](hidden), y).backward(retain_graph=True)
        (0.1 * hidden.square().mean()).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def backwards_of_last_layers(job: Job):
    """the second backward reaches only the last layer"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        (0.1 * model[4](model[:4](x).detach()).square().mean()).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def backwards_of_disjoint_parts(job: Job):
    """two backwards, each for its own layers: greedy training"""
    model, opt, loader = job.start()
    for x, y in loader:
        hidden = model[:2](x)
        (0.1 * hidden.square().mean()).backward()
        loss_of(model[2:](hidden.detach()), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def backward_of_many(job: Job):
    """torch.autograd.backward([a, b])"""
    model, opt, loader = job.start()
    for x, y in loader:
        out = model(x)
        torch.autograd.backward([loss_of(out, y), 0.1 * out.square().mean()])
        opt.step()
        opt.zero_grad()
    return model


@loop
def backward_of_output(job: Job):
    """out.backward(gradient): a gradient cache"""
    model, opt, loader = job.start()
    for x, y in loader:
        with torch.no_grad():
            cached = model(x)
        cached.requires_grad_()
        loss_of(cached, y).backward()
        model(x).backward(cached.grad)
        opt.step()
        opt.zero_grad()
    return model


@loop
def zero_between_backwards(job: Job):
    """zero_grad between two backwards: only the second counts"""
    model, opt, loader = job.start()
    for x, y in loader:
        (0.5 * model(x).square().mean()).backward()
        opt.zero_grad()
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def accumulated_by_hand(job: Job):
    """three micro-batches, each loss divided by three, one step"""
    model, opt, loader = job.start()
    for i, (x, y) in enumerate(loader):
        (loss_of(model(x), y) / 3).backward()
        if (i + 1) % 3 == 0:
            opt.step()
            opt.zero_grad()
    return model


@loop
def accumulated_with_a_rest(job: Job):
    """two micro-batches to a step, five batches: the rest is stepped at the end"""
    model, opt, loader = job.start(steps=5)
    for i, (x, y) in enumerate(loader):
        (loss_of(model(x), y) / 2).backward()
        if (i + 1) % 2 == 0 or i == 4:
            opt.step()
            opt.zero_grad()
    return model


@loop
def accumulate(job: Job):
    """prepare(accumulate=2); one plain step is on both batches"""
    model, opt, loader = job.start(accumulate=2)
    for i, (x, y) in enumerate(loader):
        (loss_of(model(x), y) / (2 if job.plain else 1)).backward()
        if not job.plain or i % 2:
            opt.step()
            opt.zero_grad()
    return model


@loop
def accumulate_with_a_rest(job: Job):
    """prepare(accumulate=2) and five batches: the last window has one"""
    model, opt, loader = job.start(accumulate=2, steps=5)
    for i, (x, y) in enumerate(loader):
        (loss_of(model(x), y) / (2 if job.plain and i < 4 else 1)).backward()
        if not job.plain or i % 2 or i == 4:
            opt.step()
            opt.zero_grad()
    return model


@loop(nonlinear=True)
def accumulate_clipped(job: Job):
    """prepare(accumulate=2), clipping where the step is made"""
    import paceline

    model, opt, loader = job.start(accumulate=2)
    for i, (x, y) in enumerate(loader):
        (loss_of(model(x), y) / (2 if job.plain else 1)).backward()
        if (i % 2) if job.plain else paceline.will_step(opt):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if not job.plain or i % 2:
            opt.step()
            opt.zero_grad()
    return model


@loop
def no_sync(job: Job):
    """paceline.no_sync around all but the last micro-batch"""
    import contextlib

    import paceline

    model, opt, loader = job.start()
    for i, (x, y) in enumerate(loader):
        last = i % 3 == 2
        with contextlib.nullcontext() if job.plain or last else paceline.no_sync(opt):
            (loss_of(model(x), y) / (3 if job.plain else 1)).backward()
        if last:
            opt.step()
            opt.zero_grad()
    return model


@loop
def backward_without_step(job: Job):
    """every third batch is backwarded, zeroed and not stepped"""
    model, opt, loader = job.start()
    for i, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        if i % 3 != 1:
            opt.step()
        opt.zero_grad()
    return model


@loop
def backward_without_step_or_zero(job: Job):
    """a step is left out, and its gradient stays for the next"""
    model, opt, loader = job.start()
    for i, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        if i % 3 != 1:
            opt.step()
            opt.zero_grad()
    return model


@loop
def ends_in_mid_step(job: Job):
    """the last backward is never stepped"""
    model, opt, loader = job.start()
    for i, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        if i < 5:
            opt.step()
            opt.zero_grad()
    return model


@loop
def step_without_backward(job: Job):
    """steps without a gradient, at the start and in between"""
    model, opt, loader = job.start()
    opt.step()
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        opt.step()
    return model


@loop
def step_twice(job: Job):
    """two steps by one gradient"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.step()
        opt.zero_grad()
    return model


@loop
def zero_never(job: Job):
    """no zero_grad at all: gradients add up over steps"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
    return model


@loop
def checkpointed(job: Job):
    """activation checkpointing, not reentrant"""
    model, opt, loader = job.start()
    for x, y in loader:
        hidden = checkpoint(model[:2], x, use_reentrant=False)
        loss_of(checkpoint(model[2:], hidden, use_reentrant=False), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def checkpointed_reentrant(job: Job):
    """activation checkpointing, reentrant"""
    model, opt, loader = job.start()
    for x, y in loader:
        hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
        loss_of(checkpoint(model[2:], hidden, use_reentrant=True), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def gradient_penalty(job: Job):
    """the gradient by the input is part of the loss: create_graph"""
    model, opt, loader = job.start()
    for x, y in loader:
        x.requires_grad_()
        loss = loss_of(model(x), y)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (loss + 0.1 * (grad.norm(dim=1) - 1).square().mean()).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def penalty_of_weights_gradient(job: Job):
    """the norm of the parameters' gradient is penalised, by create_graph over them; quadratic in the batch"""
    model, opt, loader = job.start()
    for x, y in loader:
        params = list(model.parameters())
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        total = losses.mean()
        for i in range(len(losses)):
            grads = torch.autograd.grad(losses[i], params, create_graph=True)
            total = total + 0.01 * sum(g.square().sum() for g in grads) / len(losses)
        total.backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def maml(job: Job):
    """an inner step by autograd.grad for each task, functional_call, the outer loss backwarded"""
    model, opt, loader = job.start()
    for x, y in loader:
        params = dict(model.named_parameters())
        outer = torch.zeros(())
        for i in range(len(x)):  # a task for each sample, so that the mean over workers is the mean over tasks
            inner = loss_of(torch.func.functional_call(model, params, (x[i : i + 1],)), y[i : i + 1])
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
            outer = outer + loss_of(torch.func.functional_call(model, fast, (x[i : i + 1] + 0.1,)), y[i : i + 1])
        (outer / len(x)).backward()
        opt.step()
        opt.zero_grad()
    return model


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.GRUCell(2, 5), nn.Linear(5, 3)

    def forward(self, x, hidden):
        outs = []
        for t in range(x.shape[1]):
            hidden = self.cell(x[:, t], hidden)
            outs.append(hidden)
        return self.head(hidden), hidden


@loop
def truncated_bptt(job: Job):
    """the hidden state is carried from chunk to chunk, detached, a step for each"""
    model, opt, loader = job.start(_Recurrent())
    for x, y in loader:
        hidden = torch.zeros(len(x), 5)
        for chunk in x.view(len(x), 3, 2).split(1, dim=1):
            out, hidden = model(chunk, hidden.detach())
            loss_of(out, y).backward()
            opt.step()
            opt.zero_grad()
    return model


@loop
def backward_in_thread(job: Job):
    """backward is called in another thread than step"""
    import threading

    model, opt, loader = job.start()
    for x, y in loader:
        loss = loss_of(model(x), y)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        opt.step()
        opt.zero_grad()
    return model


@loop
def next_forward_before_step(job: Job):
    """the next batch's forward runs between backward and step, its backward after the step is not made"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        with torch.no_grad():
            model(x)
        opt.step()
        opt.zero_grad()
    return model


@loop
def sum_of_losses(job: Job):
    """losses of several batches are added up and backwarded once"""
    model, opt, loader = job.start()
    it = iter(loader)
    for first, second in zip(it, it, strict=True):
        loss = 0.5 * (loss_of(model(first[0]), first[1]) + loss_of(model(second[0]), second[1]))
        loss.backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def chunks_of_a_batch(job: Job):
    """a batch in chunks by hand, each loss divided by the chunks: minibatches inside a batch"""
    model, opt, loader = job.start()
    for x, y in loader:
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (loss_of(model(a), b) / 2).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def without_a_loader(job: Job):
    """no loader: every worker takes its part of a batch by its rank"""
    model = net()
    model, opt = job.prepare(model, job.optimizer(model.parameters()))
    for x, y in batches():
        loss_of(model(job.mine(x)), job.mine(y)).backward()
        opt.step()
        opt.zero_grad()
    return model
