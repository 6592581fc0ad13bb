"""The random numbers that a training script draws: torch's on the CPU and the GPU, numpy's, and Python's own.

[Note: random streams] A script that begins with `torch.manual_seed(0)` seeds every worker alike, and all would draw the
same dropout masks, noise and mixup factors: N workers, and the noise of one. So `prepare` gives each worker streams of
its own, by one rule at any number of workers: worker 0 keeps the streams that the script left it, and worker R's begin
at a digest of worker 0's and of R. A world of one is worker 0, and draws what plain PyTorch draws. The digest is of
where the streams stand, so any of the four may be the one that the script has seeded, and a script that seeds again
and prepares again begins anew. The same rule is followed where a checkpoint is loaded by another number of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
import threading
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.random as _numpy_random  # noqa: F401  # numpy imports it late, which may hang in a forked loader process
import torch
from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.errors import DataError

KINDS = ("cpu", "cuda", "numpy", "python")
_WORDS = 624  # of the Mersenne twister's memory, which numpy and Python both use
# A generator of torch wraps its state while it holds a lock of its own. The garbage collector may run just then and let
# another thread go on; if that thread asks for the generator too, it waits for the lock and never lets the first go on.
_generator = threading.Lock()


def states() -> dict[str, Tensor]:
    """Where this worker's streams stand, by kind. The GPU's is left out as long as nothing has used the GPU."""
    found = _host_states()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore(saved: Mapping[str, Tensor]) -> None:
    """Let this worker's streams go on from where `states` saw them. A kind that was not saved stays as it is."""
    put = {"cpu": _put_cpu, "cuda": _put_cuda, "numpy": _put_numpy, "python": _put_python}
    for kind, state in saved.items():
        try:
            put[kind](state)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"the saved state of the {kind} random numbers is damaged",
                why=f"{type(error).__name__}: {error}",
                do="load an earlier checkpoint",
            ) from None


def separate(comm: Comm) -> None:
    """Give every worker but the first streams of its own. All workers call it together: [Note: random streams]."""
    if comm.world_size == 1:
        return
    origin = comm.broadcast(origins(states())).wait()
    if comm.rank:
        begin(origin, comm.rank)


def origins(saved: Mapping[str, Tensor]) -> Tensor:
    """A digest for each kind of stream, of where it stands. A kind that was not saved takes after the CPU's."""
    return torch.tensor([_digest(kind, *saved.get(kind, saved["cpu"]).tolist()) for kind in KINDS])


def begin(origin: Tensor, rank: int) -> None:
    """Begin this worker's own streams, which follow from its rank and the origins of worker 0."""
    cpu, cuda, numpy, python = (_digest("stream", one, rank) for one in origin.tolist())
    _seed_host(cpu, numpy, python)
    torch.cuda.manual_seed_all(cuda)  # takes effect later where the GPU is not in use yet


class SideStreams:
    """Random streams on the host beside the process's own. While entered, the process draws from them."""

    def __init__(self, *numbers: int) -> None:
        """Begin where the numbers say: equal ones give equal streams."""
        self.numbers = numbers
        self._states: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Draw from these streams inside, and from the process's own again after it."""
        outside = _host_states()
        if self._states:
            restore(self._states)
        else:
            _seed_host(*(_digest(kind, *self.numbers) for kind in ("cpu", "numpy", "python")))
        try:
            yield
        finally:
            self._states = _host_states()
            restore(outside)


def _digest(word: str, *numbers: int) -> int:
    """One number of 62 bits, which looks like no other's."""
    text = f"{word} {' '.join(map(str, numbers))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2


def _seed_host(cpu: int, numpy: int, python: int) -> None:
    with _generator:
        torch.default_generator.manual_seed(cpu)
    np.random.seed([numpy >> 32, numpy & 0xFFFFFFFF])
    random.seed(python)


def _host_states() -> dict[str, Tensor]:
    with _generator:
        found = {"cpu": torch.get_rng_state()}
    found["python"] = _python_state()
    if (numpy := _numpy_state()) is not None:
        found["numpy"] = numpy
    return found


# numpy's and Python's streams are a Mersenne twister's words, the place among them, and a normal number kept back.


def _numpy_state() -> Tensor | None:
    """None where the script has put another kind of generator in the place of numpy's own."""
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return None
    spare = [int(state["has_gauss"]), _as_bits(float(state["gauss"]))]
    return torch.tensor([*state["state"]["key"].tolist(), int(state["state"]["pos"]), *spare])


def _python_state() -> Tensor:
    _, words, spare = random.getstate()
    return torch.tensor([*words, int(spare is not None), _as_bits(spare or 0.0)])


def _put_cpu(state: Tensor) -> None:
    own = state.clone()
    with _generator:
        torch.set_rng_state(own)


def _put_cuda(state: Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state.clone())


def _put_numpy(state: Tensor) -> None:
    if _numpy_state() is not None:
        words, place, has_spare, spare = _parts(state)
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), place, has_spare, spare))


def _put_python(state: Tensor) -> None:
    words, place, has_spare, spare = _parts(state)
    random.setstate((3, (*words, place), spare if has_spare else None))


def _parts(state: Tensor) -> tuple[list[int], int, int, float]:
    numbers: list[int] = state.tolist()
    if state.dtype != torch.int64 or len(numbers) != _WORDS + 3:
        raise ValueError(f"{len(numbers)} numbers of {state.dtype}, not {_WORDS + 3} of torch.int64")
    words, (place, has_spare, spare) = numbers[:_WORDS], numbers[_WORDS:]
    if not 0 <= place <= _WORDS or not all(0 <= word < 2**32 for word in words):
        raise ValueError("its words or its place are out of range")
    return words, place, has_spare, _from_bits(spare)


def _as_bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _from_bits(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
