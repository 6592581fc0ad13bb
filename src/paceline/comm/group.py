"""Who we are: this worker's place among the workers it trains with, and the lanes between them.

[Note: by reference] There is one Group object for each set of workers that a process belongs to, and everything that
asks for a rank or a world size holds that object, never a copy of its numbers. When the membership changes, the object
becomes the group of the next epoch (`become`), and whoever asks again hears what is true now. Lanes are asked for by
name every time they are used, for the same reason: those of an older epoch are gone.

Groups are made from a store and a prefix that names the epoch and the lane, never from another process group. So they
need no default group of torch.distributed, and can be made again in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.comm.single import SingleComm
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.comm.board import StoreBoard
    from paceline.comm.protocol import Comm


class Group:
    """The workers of one epoch, as one of them sees them: [Note: by reference].

    axis: what the group stands for ("data"), where a job has several.
    epoch: how often the membership has changed before.
    joined: the ranks that were not members of the epoch before, and know nothing of it.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        make_lane: Callable[[str], Comm],
        *,
        board: StoreBoard | None = None,
        axis: str = "data",
        epoch: int = 0,
        joined: Collection[int] = (),
    ) -> None:
        self.rank, self.world_size, self.axis, self.epoch = rank, world_size, axis, epoch
        self.joined = frozenset(joined)
        self.board = board
        self._make_lane = make_lane
        self._lanes: dict[str, Comm] = {}
        if board is not None:
            board.counts = self._counts

    @classmethod
    def single(cls) -> Group:
        """A world of one."""
        return cls(0, 1, lambda name: SingleComm())

    @classmethod
    def over(cls, comm: Comm) -> Group:
        """A group of which every lane is this one, for whoever has nothing else."""
        return cls(comm.rank, comm.world_size, lambda name: comm)

    def lane(self, name: str) -> Comm:
        """The Comm of this name, whose operations are ordered among themselves and independent of other lanes'.

        It is made when it is first asked for. All workers must ask for a new one at the same point.
        """
        if name not in self._lanes:
            self._lanes[name] = self._make_lane(name)
        return self._lanes[name]

    @property
    def lanes(self) -> Mapping[str, Comm]:
        """The lanes that have been made in this epoch, by name."""
        return self._lanes

    @property
    def source(self) -> int:
        """The lowest rank that has been a member before: joiners get their state from it."""
        return min(set(range(self.world_size)) - self.joined, default=0)

    def become(self, other: Group) -> None:
        """Be the group of another epoch from now on: whoever holds this object sees the other's members and lanes."""
        self.rank, self.world_size, self.axis, self.epoch = other.rank, other.world_size, other.axis, other.epoch
        self.joined, self.board = other.joined, other.board
        self._make_lane, self._lanes = other._make_lane, other._lanes

    def _counts(self) -> dict[str, int]:
        """How many operations this worker has begun on each lane, for the board."""
        return {name: lane.ops for name, lane in self._lanes.items()}

    def __reduce__(self) -> Any:
        """A data loader's process gets the numbers, and no lanes: it is not a worker."""
        return _without_lanes, (self.rank, self.world_size, self.axis, self.epoch)

    def __repr__(self) -> str:
        return f"Group(worker {self.rank} of {self.world_size}, axis {self.axis}, epoch {self.epoch})"


def _without_lanes(rank: int, world_size: int, axis: str, epoch: int) -> Group:
    def refuse(name: str) -> NoReturn:
        raise UsageError(
            f"a process of worker {rank}'s data loader asked for the lane {name!r}",
            why="it is not a worker itself",
            do="communicate in the training loop, not in a data set or a collate function",
        )

    return Group(rank, world_size, refuse, axis=axis, epoch=epoch)
