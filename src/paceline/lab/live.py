"""How much memory tensors take, counted: what is alive now, and the most that ever was.

Python does not see tensors that autograd has saved or that an operation holds, and the system's figure does not fall
when memory is free again. So every operation's results are noted with a weak reference to their storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Inside `with Live(known) as live`: storages of tensors that this thread makes, and of those given.

    Every operation becomes slow: not for timing.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self._note(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._note(x for x in tree_leaves(out) if isinstance(x, Tensor))
        self.peak = max(self.peak, self.bytes())
        return out

    def _note(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            if is_traceable_wrapper_subclass(x):  # a DTensor: its part here
                self._note(getattr(x, name) for name in x.__tensor_flatten__()[0])
            elif type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta:
                ref = StorageWeakRef(x.untyped_storage())
                self._seen.setdefault(ref.cdata, ref)

    def bytes(self) -> int:
        """Of what is alive; a storage may have been given back and be there all the same."""
        total = 0
        for cdata in list(self._seen):
            storage = torch.UntypedStorage._new_with_weak_ptr(cdata)
            if storage is None:
                del self._seen[cdata]
            else:
                total += storage.nbytes()
        return total
