"""What a parameter is while it is in shards: whoever asks for its values outside of its module gathers them.

[Note: outside] A module's hooks gather its parameters before it computes, and everything else that uses a parameter
is seen here, because a class with `__torch_function__` is asked before any torch function touches it: copies and
averages of a model, norms that are logged, weights that are clipped, replaced or cast. Its bucket is gathered first,
as for a module: like a collective, on every worker alike. What is written reaches the shard when the bucket is
resharded. A bucket whose memory somebody outside still holds (`p.data`, `p.detach()`) keeps that memory, so that it
never points to nothing; a bucket that was used in a graph stays whole until the step.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.sharding.unshard import Unsharding

_OWNER, _PLAIN = "_paceline_unsharding", "_paceline_plain"  # attributes: who gathers it, and the class it had before
_BASE: Any = torch._C.TensorBase
_SET_DATA = _BASE.data.__set__
_VALUES = ("data", "real", "imag", "T", "mT", "H", "mH")  # the properties of which the elements are asked
_PROPERTIES = [d for name, d in inspect.getmembers(_BASE, inspect.isgetsetdescriptor) if name not in _VALUES]
_METHODS: list[Any] = [
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.__hash__),
    *(Tensor.is_complex, Tensor.is_floating_point, Tensor.is_signed, Tensor.is_inference, Tensor.is_same_size),
    *(Tensor.element_size, Tensor.get_device, Tensor.untyped_storage, Tensor.requires_grad_, Tensor.retain_grad),
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor),
]
_FUNCTIONS: list[Any] = [
    *(torch.numel, torch.is_complex, torch.is_floating_point, torch.is_signed, torch.result_type),
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
    *(torch.autograd.grad, torch.autograd.backward),
]
# What does not need the elements.
_ABOUT = {
    *(d.__get__ for d in _PROPERTIES),
    *(d.__set__ for d in _PROPERTIES),
    *_METHODS,
    *_FUNCTIONS,
}
# nn.Parameter(p), as parametrisations call it, asks p for a tensor of p's own class.
_MAKES_PARAMETER = nn.Parameter.__new__.__code__
_OTHER_MEMORY = ("set_", "resize_", "resize_as_", "share_memory_", "swap_tensors")


class ShardedParameter(nn.Parameter):
    """A parameter in shards: [Note: outside]."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ABOUT:
                return func(*args, **kwargs)
            name = getattr(func, "__name__", "")
            params = list(_sharded((*args, *kwargs.values())))
            if name in _OTHER_MEMORY and params:
                raise _refused(params[0], f"{name} gives it other memory")
            by_owner: dict[Unsharding, list[ShardedParameter]] = {}
            for p in params:
                if (owner := vars(p)[_OWNER]()) is not None:
                    by_owner.setdefault(owner, []).append(p)
            for owner, its in by_owner.items():
                owner.begin_use(its)
            sets = func == _SET_DATA
            result = None
            if sets:
                _set_data(*args)
            else:
                result = func(*args, **kwargs)
                if func is Tensor.detach and sys._getframe(1).f_code is _MAKES_PARAMETER:
                    result = Tensor._make_subclass(type(args[0]), result)
            writes = sets or "out" in kwargs or name.endswith("_")  # as in mul_ and __imul__
            for owner, its in by_owner.items():
                owner.end_use(its, _tensors(result), writes=writes)
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            values = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = vars(self).get(_PLAIN, nn.Parameter)(values, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(proto)


def shard(p: Tensor, owner: Unsharding) -> None:
    """Let a parameter be gathered when it is used."""
    if _OWNER not in vars(p):
        plain = nn.Parameter if type(p) is ShardedParameter else type(p)  # made of one: see _MAKES_PARAMETER
        mine = ShardedParameter if plain is nn.Parameter else _subclass(plain)
        vars(p).update({_OWNER: weakref.ref(owner), _PLAIN: plain})
        object.__setattr__(p, "__class__", mine)


def unshard(p: Tensor) -> Unsharding | None:
    """Let a parameter be what it was. Gives who has gathered it."""
    if _OWNER not in vars(p):
        return None
    object.__setattr__(p, "__class__", vars(p).pop(_PLAIN))
    owner: Unsharding | None = vars(p).pop(_OWNER)()
    return owner


def set_memory(p: Tensor, x: Tensor) -> None:
    """Let a parameter have this memory."""
    with torch._C.DisableTorchFunctionSubclass():
        p.data = x


def _subclass(plain: type) -> type:
    return type(plain.__name__, (ShardedParameter, plain), {})


def _sharded(args: Any) -> Iterator[ShardedParameter]:
    for x in args:
        if isinstance(x, ShardedParameter):
            if _OWNER in vars(x):
                yield x
        elif isinstance(x, (list, tuple)):
            yield from _sharded(x)
        elif isinstance(x, dict):
            yield from _sharded(x.values())


def _tensors(result: Any) -> list[Tensor]:
    some = result if isinstance(result, (list, tuple)) else [result]
    return [x for x in some if isinstance(x, Tensor)]


def _set_data(p: Tensor, x: Tensor) -> None:
    if (x.shape, x.dtype, x.device) != (p.shape, p.dtype, p.device):
        then, now = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}" for t in (p, x))
        raise _refused(p, f"it was {then} and is to be {now} (model.to, .double(), .bfloat16(), p.data = ...)")
    with torch.no_grad():
        p.detach().copy_(x)


def _refused(p: Tensor, what: str) -> UsageError:
    owner = vars(p)[_OWNER]()
    name = owner.name_of(p) if owner is not None else "?"
    return UsageError(
        f"the parameter {name} cannot become another after paceline.prepare: {what}",
        why="with this layout its elements lie in shards, one on each worker",
        do="cast and move the model before paceline.prepare; values of the same shape and type may be put into p.data",
    )
