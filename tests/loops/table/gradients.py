"""What is done to gradients between backward and step."""

from __future__ import annotations

import torch
from torch import nn

from loops.job import Job, batches, loop, loss_of, net


@loop
def plain(job: Job):
    """forward, backward, step, zero_grad"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def zero_grad_first(job: Job):
    """zero_grad before the forward"""
    model, opt, loader = job.start()
    for x, y in loader:
        opt.zero_grad()
        loss_of(model(x), y).backward()
        opt.step()
    return model


@loop
def zero_grad_before_backward(job: Job):
    """zero_grad between forward and backward, as pytorch/examples have it"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss = loss_of(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return model


@loop
def zero_grad_kept(job: Job):
    """zero_grad(set_to_none=False)"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
    return model


@loop
def zero_grad_of_model(job: Job):
    """model.zero_grad() in place of the optimizer's"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        model.zero_grad()
    return model


@loop
def zero_grad_of_model_first(job: Job):
    """model.zero_grad() between forward and backward"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss = loss_of(model(x), y)
        model.zero_grad()
        loss.backward()
        opt.step()
    return model


@loop
def grad_none_by_hand(job: Job):
    """p.grad = None after the step, as nanoGPT's ancestors do"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        for p in model.parameters():
            p.grad = None
    return model


@loop
def grad_zeroed_by_hand(job: Job):
    """p.grad.zero_() after the step"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
    return model


@loop(nonlinear=True)
def clip_norm(job: Job):
    """clip_grad_norm_; its norm is compared too"""
    model, opt, loader = job.start()
    norms = []
    for x, y in loader:
        loss_of(model(x), y).backward()
        norms.append(job.mean(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        opt.step()
        opt.zero_grad()
    return model, norms


@loop(nonlinear=True)
def clip_value(job: Job):
    """clip_grad_value_"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def clip_by_hand(job: Job):
    """the norm over all gradients and mul_, as older scripts clip"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        total = sum(p.grad.detach().pow(2).sum() for p in model.parameters()) ** 0.5
        for p in model.parameters():
            p.grad.mul_(0.1 / max(float(total), 0.1))
        opt.step()
        opt.zero_grad()
    return model


@loop
def grads_logged(job: Job):
    """the norm of every layer's gradient is logged"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        for _, p in model.named_parameters():
            p.grad.norm().item()
        opt.step()
        opt.zero_grad()
    return model


@loop
def grads_scaled(job: Job):
    """p.grad.mul_(0.5), p.grad /= 2"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
            p.grad /= 2
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def grads_sign(job: Job):
    """p.grad = p.grad.sign(): signSGD by hand"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        for p in model.parameters():
            p.grad = p.grad.sign() * 0.01
        opt.step()
        opt.zero_grad()
    return model


@loop
def autograd_grad(job: Job):
    """torch.autograd.grad and p.grad = g: no hook announces a gradient"""
    model, opt, loader = job.start()
    for x, y in loader:
        params = list(model.parameters())
        for p, g in zip(params, torch.autograd.grad(loss_of(model(x), y), params), strict=True):
            p.grad = g
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def clip_nonfinite_raises(job: Job):
    """clip_grad_norm_(error_if_nonfinite=True)"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def clip_in_two_halves(job: Job):
    """get_total_norm, then clip_grads_with_norm_"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def clip_by_layer(job: Job):
    """clip_grad_norm_ for each parameter by itself"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        for p in model.parameters():
            nn.utils.clip_grad_norm_(p, 0.05)
        opt.step()
        opt.zero_grad()
    return model


@loop
def gradient_noise(job: Job):
    """noise is added to gradients, the same on every worker"""
    model, opt, loader = job.start()
    g = torch.Generator().manual_seed(3)
    for x, y in loader:
        loss_of(model(x), y).backward()
        for p in model.parameters():
            p.grad.add_(torch.randn(p.shape, generator=g), alpha=0.01)
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def grads_clamped(job: Job):
    """p.grad.clamp_ and p.grad.data.clamp_"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        for p in model.parameters():
            p.grad.data.clamp_(-0.02, 0.02)
        opt.step()
        opt.zero_grad()
    return model


@loop
def grads_replaced(job: Job):
    """p.grad = something computed from it"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        for p in model.parameters():
            p.grad = p.grad.clone() * 0.5 + 0.01 * p.detach()
        opt.step()
        opt.zero_grad()
    return model


@loop
def grads_centred(job: Job):
    """gradient centralisation: the mean over inputs is taken off, in place"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        for p in model.parameters():
            if p.dim() > 1:
                p.grad.data.add_(-p.grad.data.mean(dim=1, keepdim=True))
        opt.step()
        opt.zero_grad()
    return model


@loop
def grads_in_foreach(job: Job):
    """torch._foreach_mul_ over all gradients"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
        opt.step()
        opt.zero_grad()
    return model


@loop
def grads_dropped(job: Job):
    """gradients of some layers are set to None before the step"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        for p in model[2 * (step % 3)].parameters():
            p.grad = None
        opt.step()
        opt.zero_grad()
    return model


@loop
def grads_dropped_once(job: Job):
    """DINO: the last layer's gradients are None in the first steps"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        opt.zero_grad()
        loss_of(model(x), y).backward()
        if step < 2:
            for name, p in model.named_parameters():
                if name.startswith("4."):
                    p.grad = None
        opt.step()
    return model


@loop(apart=True)
def grads_dropped_on_one(job: Job):
    """one worker alone sets a gradient to None, in one step"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        if step == 2 and len(x[job.has(1)]) > 0:
            model[2].weight.grad = None
        opt.step()
        opt.zero_grad()
    return model


@loop
def grads_kept_aside(job: Job):
    """gradients are cloned, zeroed, and put back: gradient surgery"""
    model, opt, loader = job.start()
    for x, y in loader:
        kept = []
        for part in (0, 1):
            opt.zero_grad()
            (loss_of(model(x), y) if part == 0 else model(x).square().mean()).backward()
            kept.append([p.grad.clone() for p in model.parameters()])
        opt.zero_grad()
        for p, a, b in zip(model.parameters(), *kept, strict=True):
            p.grad = a + 0.1 * b
        opt.step()
    return model


@loop
def grads_as_vector(job: Job):
    """all gradients in one vector, and back"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()]) * 0.5
        start = 0
        for p in model.parameters():
            p.grad.copy_(flat[start : start + p.numel()].view_as(p))
            start += p.numel()
        opt.step()
        opt.zero_grad()
    return model


@loop
def grads_via_numpy(job: Job):
    """gradients are read as numpy arrays"""
    model, opt, loader = job.start()
    seen = 0.0
    for x, y in loader:
        loss_of(model(x), y).backward()
        seen = sum(float(abs(p.grad.numpy()).sum()) for p in model.parameters())
        opt.step()
        opt.zero_grad()
    return model, job.mean(min(seen, 0.0))


@loop
def user_hook(job: Job):
    """p.register_hook of the user's doubles a gradient, before prepare and after"""
    model = net()
    model[0].weight.register_hook(lambda grad: grad * 2)
    model, opt, loader = job.prepare(model, job.optimizer(model.parameters()), batches())
    model[4].weight.register_hook(lambda grad: grad * 0.5)
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def user_post_hook(job: Job):
    """register_post_accumulate_grad_hook of the user's halves gradients in place, before prepare"""

    def halve(p: torch.Tensor) -> None:
        p.grad.mul_(0.5)

    model = net()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    model, opt, loader = job.prepare(model, job.optimizer(model.parameters()), batches())
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def step_in_backward(job: Job):
    """an optimizer for each parameter, stepped in a hook as soon as its gradient is there"""
    model = net()
    opts = {p: job.optimizer([p]) for p in model.parameters()}
    prepared = job.prepare(model, *opts.values(), batches())

    def step(p: torch.Tensor) -> None:
        opts[p].step()
        opts[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x, y in prepared[-1]:
        loss_of(model(x), y).backward()
    return model


@loop
def autograd_grad_added(job: Job):
    """p.grad += g, beside gradients that backward made"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        params = list(model.parameters())
        for p, g in zip(params, torch.autograd.grad(model(x).square().mean(), params), strict=True):
            p.grad += 0.1 * g
        opt.step()
        opt.zero_grad()
    return model


@loop
def autograd_grad_of_some(job: Job):
    """some layers by autograd.grad, the others by backward"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss = loss_of(model(x), y)
        last = list(model[4].parameters())
        grads = torch.autograd.grad(loss, last, retain_graph=True)
        loss.backward(inputs=list(model[:4].parameters()))
        for p, g in zip(last, grads, strict=True):
            p.grad = g
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def autograd_grad_clipped(job: Job):
    """autograd.grad, p.grad = g, clip_grad_norm_, step"""
    model, opt, loader = job.start()
    for x, y in loader:
        params = list(model.parameters())
        for p, g in zip(params, torch.autograd.grad(loss_of(model(x), y), params), strict=True):
            p.grad = g
        nn.utils.clip_grad_norm_(params, 0.1)
        opt.step()
        opt.zero_grad()
    return model


@loop
def autograd_grad_every_other(job: Job):
    """by turns backward and autograd.grad"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        opt.zero_grad()
        loss = loss_of(model(x), y)
        if step % 2:
            loss.backward()
        else:
            params = list(model.parameters())
            for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
                p.grad = g
        opt.step()
    return model


@loop
def functional_grad(job: Job):
    """torch.func.grad over a dictionary of parameters, p.grad = g"""
    model, opt, loader = job.start()

    def loss(params, x, y):
        return loss_of(torch.func.functional_call(model, params, (x,)), y)

    for x, y in loader:
        params = dict(model.named_parameters())
        grads = torch.func.grad(loss)({name: p.detach() for name, p in params.items()}, x, y)
        for name, p in params.items():
            p.grad = grads[name]
        opt.step()
        opt.zero_grad()
    return model


@loop
def functional_backward(job: Job):
    """functional_call with the model's own parameters, then backward"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y).backward()
        opt.step()
        opt.zero_grad()
    return model
