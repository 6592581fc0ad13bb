"""Count the memory of live tensors: the bytes now, and the most there ever were.

Python does not see tensors that autograd has saved or that an operation holds, and the system's figure does not fall
when memory is freed. So the results of every operation are recorded with a weak reference to their storage.

Gloo runs a collective in a thread of its own, with the modes of the thread that started it: operations are recorded
from several threads, under a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """A mode that counts the storages of all tensors that are made inside it, and of those in `known`.

    Use it as `with LiveTensors(known) as live:`. Every operation becomes slow, so do not time anything in it.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, StorageWeakRef] = {}
        self._lock = threading.RLock()  # a garbage collection inside may end up here again
        self.peak = 0
        self._note(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with self._lock:
            self._note(x for x in tree_leaves(out) if isinstance(x, Tensor))
            self.peak = max(self.peak, self.bytes())
        return out

    def _note(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            if is_traceable_wrapper_subclass(x):  # a DTensor, of which this worker's part counts
                self._note(getattr(x, name) for name in x.__tensor_flatten__()[0])
            elif type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta:
                ref = StorageWeakRef(x.untyped_storage())
                self._seen.setdefault(ref.cdata, ref)

    def bytes(self) -> int:
        """The bytes of all live storages. A storage whose memory was given back counts as zero."""
        total = 0
        with self._lock:
            for cdata in list(self._seen):
                storage = torch.UntypedStorage._new_with_weak_ptr(cdata)
                if storage is not None:
                    total += storage.nbytes()
                else:
                    self._seen.pop(cdata, None)
        return total
