"""What is unusual about the model, and what is done to it while it trains."""

from __future__ import annotations

import copy
import io

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from loops.job import CLASSES, INPUTS, Job, batches, loop, loss_of, net, samples


def _step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    loss_of(model(x), y).backward()
    opt.step()
    opt.zero_grad()


@loop
def frozen(job: Job):
    """a layer is frozen from the start, and in the optimizer"""
    model = net()
    model[2].requires_grad_(False)
    model, opt, loader = job.start(model)
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop
def freezing(job: Job):
    """layers freeze and thaw in mid-run"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        model[2].requires_grad_(step not in (2, 3))
        _step(model, opt, x, y)
    return model


@loop
def thawing_one_by_one(job: Job):
    """only the head trains at first; a layer more every two steps"""
    model = net()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    model, opt, loader = job.start(model)
    for step, (x, y) in enumerate(loader):
        if step in (2, 4):
            model[4 - step].requires_grad_(True)
        _step(model, opt, x, y)
    return model


@loop
def layer_swapped(job: Job):
    """a layer is replaced in mid-run, with a new optimizer group in place of the old"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if step == 3:
            torch.manual_seed(9)
            new = nn.Linear(8, CLASSES)
            model[4] = new
            kept = [p for p in opt.param_groups[0]["params"] if any(p is q for q in model.parameters())]
            opt.param_groups[0]["params"] = kept
            opt.add_param_group({"params": list(new.parameters())})
        _step(model, opt, x, y)
    return model


@loop
def parameter_replaced(job: Job):
    """module.weight = nn.Parameter(...) in mid-run, and in the optimizer's group"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if step == 3:
            old = model[0].weight
            model[0].weight = nn.Parameter(torch.full_like(net()[0].weight, 0.1))
            params = opt.param_groups[0]["params"]
            opt.param_groups[0]["params"] = [model[0].weight if p is old else p for p in params]
        _step(model, opt, x, y)
    return model


class _Branches(nn.Module):
    """Two branches, and a head for both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.unused = nn.Linear(INPUTS, 8), nn.Linear(INPUTS, 8), nn.Linear(3, 3)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        if first is None:
            return self.head(torch.tanh(self.a(x)))
        hidden = [layer(x[part]) for layer, part in ((self.a, first), (self.b, ~first)) if part.any()]
        return self.head(torch.tanh(torch.cat(hidden)))


@loop
def unused_parameters(job: Job):
    """some parameters are never used"""
    model, opt, loader = job.start(_Branches())
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop
def unused_by_turns(job: Job):
    """branches are used by turns: LayerDrop"""
    model, opt, loader = job.start(_Branches())
    for step, (x, y) in enumerate(loader):
        loss_of(model(x, torch.full((len(x),), step % 2 == 0)), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def unused_on_one_worker(job: Job):
    """each worker's samples use another branch"""
    model, opt, loader = job.start(_Branches())
    for x, y in loader:
        first = torch.zeros(len(x), dtype=torch.bool)
        first[job.has(0)] = True
        loss_of(model(x, first), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def unused_with_momentum(job: Job):
    """branches by turns; what has no gradient keeps its momentum from moving it, as in plain torch"""
    model = _Branches()
    model, opt, loader = job.start(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for step, (x, y) in enumerate(loader):
        loss_of(model(x, torch.full((len(x),), step % 2 == 0)), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def tied_weights(job: Job):
    """two layers share a weight"""
    model = net()
    model[4].weight = nn.Parameter(torch.randn(CLASSES, 8) * 0.1)
    model = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), *model[3:])
    model[4].weight = model[2].weight
    model, opt, loader = job.start(model)
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop
def tied_after_prepare(job: Job):
    """weights are tied after prepare"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    model, opt, loader = job.start(model)
    model[4].weight = model[2].weight
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop
def module_used_twice(job: Job):
    """one module is called twice in a forward"""
    model, opt, loader = job.start()
    for x, y in loader:
        hidden = model[1](model[0](x))
        loss_of(model[4](torch.tanh(model[2](torch.tanh(model[2](hidden))))), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def parts_called(job: Job):
    """layers are called, the model itself never is"""
    model, opt, loader = job.start()
    for x, y in loader:
        for layer in model:
            x = layer(x)
        loss_of(x, y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def ema_averaged_model(job: Job):
    """AveragedModel with an exponential mean; it is compared too"""
    model, opt, loader = job.start()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x, y in loader:
        _step(model, opt, x, y)
        ema.update_parameters(model)
    return model, {name: p.detach().clone() for name, p in ema.named_parameters()}


@loop
def ema_deepcopy(job: Job):
    """timm: a deep copy, lerped by state_dict"""
    model, opt, loader = job.start()
    ema = copy.deepcopy(model)
    for x, y in loader:
        _step(model, opt, x, y)
        with torch.no_grad():
            for e, v in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                e.copy_(0.9 * e + 0.1 * v)
    return model, ema


@loop
def ema_lerp(job: Job):
    """shadow tensors, lerp_ with p.data after the step"""
    model, opt, loader = job.start()
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.data, 0.1)
        opt.zero_grad()
    return model, shadow


@loop
def ema_swapped_in(job: Job):
    """the mean's weights are swapped in for an evaluation, and back"""
    model, opt, loader = job.start()
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    x_val, _ = samples(8, seed=3)
    seen = []
    for x, y in loader:
        _step(model, opt, x, y)
        with torch.no_grad():
            for name, p in model.named_parameters():
                shadow[name].lerp_(p, 0.1)
            own = {name: p.clone() for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.copy_(shadow[name])
            seen.append(model(x_val).clone())
            for name, p in model.named_parameters():
                p.copy_(own[name])
    return model, seen


@loop
def target_network(job: Job):
    """DQN: a target network, load_state_dict every other step, its output in the loss"""
    model, opt, loader = job.start()
    target = copy.deepcopy(model)
    for step, (x, _) in enumerate(loader):
        with torch.no_grad():
            goal = 0.9 * target(x + 0.1) + 0.1
        nn.functional.smooth_l1_loss(model(x), goal).backward()
        opt.step()
        opt.zero_grad()
        if step % 2:
            target.load_state_dict(model.state_dict())
    return model, target


@loop
def swa(job: Job):
    """SWA: AveragedModel, SWALR, update_bn"""
    model, opt, loader = job.start()
    averaged, scheduler = AveragedModel(model), SWALR(opt, swa_lr=0.02, anneal_epochs=2)
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step >= 2:
            averaged.update_parameters(model)
            scheduler.step()
    update_bn(batches(), averaged)
    return model, {name: p.detach().clone() for name, p in averaged.named_parameters()}


@loop
def weights_clamped(job: Job):
    """weights are clamped in no_grad after the step"""
    model, opt, loader = job.start()
    for x, y in loader:
        _step(model, opt, x, y)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
    return model


@loop
def weights_clamped_by_data(job: Job):
    """p.data.clamp_ after the step"""
    model, opt, loader = job.start()
    for x, y in loader:
        _step(model, opt, x, y)
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)
    return model


@loop
def weights_normalised(job: Job):
    """rows of a weight are normalised after the step"""
    model, opt, loader = job.start()
    for x, y in loader:
        _step(model, opt, x, y)
        with torch.no_grad():
            model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True))
    return model


@loop
def data_replaced(job: Job):
    """p.data = another tensor, in mid-run"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 2:
            for p in model.parameters():
                p.data = p.data * 0.5
    return model


@loop
def weights_reset(job: Job):
    """a layer is initialised anew in mid-run, alike on all workers"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 2:
            torch.manual_seed(4)
            model[4].reset_parameters()
    return model


@loop(apart=True)
def weights_reset_differently(job: Job):
    """one worker alone writes weights: replicas differ from then on"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 2 and job.rank == 1:
            with torch.no_grad():
                model[4].weight.add_(0.3)
    return model


@loop
def state_dict_loaded(job: Job):
    """load_state_dict in mid-run, on all workers"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 1:
            kept = {k: v.clone() for k, v in model.state_dict().items()}
        if step == 3:
            model.load_state_dict(kept)
    return model


@loop(apart=True)
def state_dict_loaded_on_one(job: Job):
    """load_state_dict on worker 0 alone"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 2 and job.rank == 0:
            model.load_state_dict(net(seed=3).state_dict())
    return model


@loop
def state_dict_in_mid_step(job: Job):
    """state_dict is taken between backward and step"""
    model, opt, loader = job.start()
    kept = []
    for x, y in loader:
        loss_of(model(x), y).backward()
        kept.append({k: v.clone() for k, v in model.state_dict().items()})
        opt.step()
        opt.zero_grad()
    return model, kept


@loop
def to_double(job: Job):
    """model.double() after prepare"""
    model, opt, loader = job.start()
    model.double()
    for x, y in loader:
        _step(model, opt, x.double(), y)
    return model


@loop(tolerance=1000)
def to_bfloat16(job: Job):
    """model.to(bfloat16) in mid-run"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if step == 3:
            model.to(torch.bfloat16)
        _step(model, opt, x.to(model[0].weight.dtype), y)
    return model


@loop
def double_before(job: Job):
    """a model in float64 from the start"""
    model, opt, loader = job.start(net().double())
    for x, y in loader:
        _step(model, opt, x.double(), y)
    return model


@loop
def mixed_dtypes(job: Job):
    """a layer in float64 among others in float32"""
    model = net()
    model[2].double()
    model, opt, loader = job.start(model)
    for x, y in loader:
        hidden = model[2](model[:2](x).double()).float()
        loss_of(model[4](torch.tanh(hidden)), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def evaluated(job: Job):
    """model.eval(), no_grad, model.train() after every step; the losses are compared"""
    model, opt, loader = job.start()
    x_val, y_val = samples(8, seed=3)
    seen = []
    for x, y in loader:
        _step(model, opt, x, y)
        model.eval()
        with torch.no_grad():
            seen.append(job.mean(loss_of(model(x_val), y_val)))
        model.train()
    return model, seen


@loop
def evaluated_in_inference_mode(job: Job):
    """inference_mode in mid-run"""
    model, opt, loader = job.start()
    x_val, y_val = samples(8, seed=3)
    seen = []
    for x, y in loader:
        _step(model, opt, x, y)
        with torch.inference_mode():
            seen.append(float(loss_of(model(x_val), y_val)))
    return model, [job.mean(value) for value in seen]


@loop
def evaluated_in_mid_step(job: Job):
    """an evaluation between backward and step"""
    model, opt, loader = job.start()
    x_val, y_val = samples(8, seed=3)
    seen = []
    for x, y in loader:
        loss_of(model(x), y).backward()
        with torch.no_grad():
            seen.append(float(loss_of(model(x_val), y_val)))
        opt.step()
        opt.zero_grad()
    return model, [job.mean(value) for value in seen]


@loop
def evaluated_on_one(job: Job):
    """only the main worker evaluates, in mid-run"""
    model, opt, loader = job.start()
    x_val, _ = samples(8, seed=3)
    for x, y in loader:
        _step(model, opt, x, y)
        if job.rank == 0:
            with torch.no_grad():
                model(x_val)
    return model


@loop
def saved_on_one(job: Job):
    """only the main worker takes state_dict, as scripts with `if rank == 0: torch.save` do"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 2 and job.rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, io.BytesIO())
    return model


@loop
def saved_and_loaded(job: Job):
    """torch.save of both state_dicts, back into both, by all workers"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 2:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, file)
            file.seek(0)
            kept = torch.load(file, weights_only=True)
            model.load_state_dict(kept["model"])
            opt.load_state_dict(kept["optimizer"])
    return model


@loop
def model_pickled(job: Job):
    """torch.save(model) in mid-run; what was saved is compared with the state of then"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 2:
            torch.save(model, io.BytesIO())
    return model


@loop
def optimizer_pickled(job: Job):
    """copy.deepcopy(optimizer) and its pickle in mid-run"""
    import pickle

    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 2:
            pickle.dumps(opt)
    return model


@loop
def copy_before_prepare(job: Job):
    """a deep copy made before prepare is a teacher: its output is in the loss"""
    model = net()
    teacher = copy.deepcopy(model)
    model, opt, loader = job.start(model)
    for x, y in loader:
        with torch.no_grad():
            goal = teacher(x)
        (loss_of(model(x), y) + (model(x) - goal).square().mean()).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def copy_trained(job: Job):
    """a deep copy made after prepare is trained by a plain optimizer, on the same data on every worker"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 2:
            other = copy.deepcopy(model)
            plain = torch.optim.SGD(other.parameters(), lr=0.1)
            for _ in range(2):
                x_val, y_val = samples(8, seed=3)
                loss_of(other(x_val), y_val).backward()
                plain.step()
                plain.zero_grad()
    return model, {name: p.detach().clone() for name, p in other.named_parameters()}


@loop
def weight_norm(job: Job):
    """parametrizations.weight_norm"""
    model = net()
    nn.utils.parametrizations.weight_norm(model[2])
    model, opt, loader = job.start(model)
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop
def weight_norm_old(job: Job):
    """torch.nn.utils.weight_norm, by a forward hook"""
    model = net()
    nn.utils.weight_norm(model[2])
    model, opt, loader = job.start(model)
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop(tolerance=10)
def spectral_norm(job: Job):
    """parametrizations.spectral_norm"""
    model = net()
    nn.utils.parametrizations.spectral_norm(model[2])
    model, opt, loader = job.start(model)
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop
def parametrized_later(job: Job):
    """a parametrization is registered in mid-run"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if step == 3:
            torch.nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh())
        _step(model, opt, x, y)
    return model


@loop
def sparse_embedding(job: Job):
    """an embedding with sparse gradients"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    model, opt, loader = job.start(model)
    for x, y in loader:
        loss_of(model((x[:, :2].abs() * 4).long().clamp(max=9)), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def dense_embedding(job: Job):
    """an embedding with dense gradients"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 6, padding_idx=0), nn.Flatten(), nn.Linear(12, 3))
    model, opt, loader = job.start(model)
    for x, y in loader:
        loss_of(model((x[:, :2].abs() * 4).long().clamp(max=9)), y).backward()
        opt.step()
        opt.zero_grad()
    return model


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.b = nn.Parameter(torch.randn(INPUTS, CLASSES, dtype=torch.complex64)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.w).abs() + self.b


@loop
def complex_weights(job: Job):
    """complex parameters"""
    model, opt, loader = job.start(_Complex())
    for x, y in loader:
        _step(model, opt, x, y)
    return model


class _Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0))
        self.inner = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x) + self.empty.sum()


@loop
def scalar_and_empty(job: Job):
    """parameters without dimensions and without elements"""
    model, opt, loader = job.start(_Scalars())
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop
def not_contiguous(job: Job):
    """a parameter that is a transposed view, channels last"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 3))
    model[1].to(memory_format=torch.channels_last)
    model[3].weight = nn.Parameter(torch.randn(8, 3).mul(0.1).t())
    model, opt, loader = job.start(model)
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop
def user_forward_hooks(job: Job):
    """forward hooks of the user read weights and change outputs"""
    model, opt, loader = job.start()
    model[0].register_forward_hook(lambda module, args, out: out * (1 + module.weight.detach().square().mean()))
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop
def l2_by_hand(job: Job):
    """the squared norm of all weights is added to the loss, outside of any forward"""
    model, opt, loader = job.start()
    for x, y in loader:
        (loss_of(model(x), y) + 0.01 * sum(p.square().sum() for p in model.parameters())).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def weights_logged(job: Job):
    """norms of weights and of their changes are logged"""
    model, opt, loader = job.start()
    seen = []
    for x, y in loader:
        before = [p.detach().clone() for p in model.parameters()]
        _step(model, opt, x, y)
        seen.append(float(sum((p - q).norm() for p, q in zip(model.parameters(), before, strict=True))))
    return model, [job.mean(value) for value in seen]


@loop
def parameters_as_vector(job: Job):
    """parameters_to_vector and vector_to_parameters in mid-run"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 2:
            vector = nn.utils.parameters_to_vector(model.parameters()).detach()
            nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    return model
