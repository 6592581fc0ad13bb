"""The mathematics of synchronous model averaging (Koliousis et al., Crossbow, VLDB 2019), as pure functions.

K replicas wⱼ are drawn to a centre z, which moves by the sum of their corrections and by a momentum of its own:

    cⱼ = α·(wⱼ − z);  wⱼ ← update(wⱼ) − cⱼ;  z' = z + Σⱼ cⱼ + μ·(z − z_prev)

`syncs/sma.py` has one replica on each worker, `learners/` a stack of them on each device.
"""

from __future__ import annotations

from torch import Tensor


def largest_alpha(replicas: int, mu: float) -> float:
    """The bound on α: from here on the distance between centre and replicas would grow from step to step."""
    return 2 * (1 + mu) / (1 + replicas + mu)


def correction(w: Tensor, z: Tensor, alpha: float) -> Tensor:
    """c = α·(w − z), of one replica or of a stack of them."""
    return (w - z).mul_(alpha)


def corrected_(w: Tensor, z: Tensor, alpha: float) -> Tensor:
    """w becomes w − α·(w − z), in place and in one pass, where the correction itself is not needed."""
    return w.lerp_(z, alpha)


def next_centre(z: Tensor, z_prev: Tensor, total: Tensor, mu: float, *, alpha: float = 1.0) -> Tensor:
    """z' = z + α·total + μ·(z − z_prev).

    total: the sum of all corrections; or the sum of all wⱼ − z, which is given its α here.
    """
    return (z - z_prev).mul_(mu).add_(z).add_(total, alpha=alpha)
