"""Parameters into buckets: once, before the first backward.

They are taken in reverse order of registration, which is about the order in which backward meets them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from torch import Tensor

from paceline.core.bucket import Bucket

Kind = Callable[[str, Tensor], Hashable] | None  # by name and parameter: those of different kinds stay apart


def cut(
    named: Sequence[tuple[str, Tensor]],
    world_size: int,
    cap_bytes: int,
    first_bytes: int | None = None,
    kind: Kind = None,
) -> Iterator[Bucket]:
    """Buckets of at most cap_bytes, one dtype, device and kind each, numbered as they fill.

    A larger parameter is alone, but for the little that came just before it: a bias is not worth an operation. The
    first bucket is smaller: the sooner it is full, the sooner the wire is busy. Each is made when it is asked for: who
    gives its memory back at once never has them all.
    """
    open_: dict[object, list[tuple[str, Tensor]]] = {}
    size: dict[object, int] = {}
    closed: list[list[tuple[str, Tensor]]] = []
    for name, p in reversed(named):
        key = (p.dtype, p.device, kind and kind(name, p))  # complex ones apart: pairs must start at an even place
        here = p.nbytes
        cap = cap_bytes if closed or first_bytes is None else first_bytes
        if key in open_ and size[key] + here > cap and size[key] >= cap // 4:
            closed.append(open_.pop(key))
        open_.setdefault(key, []).append((name, p))
        size[key] = here if len(open_[key]) == 1 else size[key] + here
    closed += open_.values()
    place = {name: i for i, (name, _) in enumerate(named)}
    closed.sort(key=lambda group: -place[group[-1][0]])  # as they fill, which several kinds do not in turn
    return (Bucket(i, group, world_size) for i, group in enumerate(closed))
