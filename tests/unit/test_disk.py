"""State on disk: what was written comes back, and whatever goes wrong is named."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from paceline.errors import StoreError, UsageError
from paceline.offload import disk as stores
from paceline.offload import file
from paceline.offload.disk import CHUNK, PAGE, Disk, aligned, checksum, padded, speed

SHM = Path("/dev/shm")
MIB = 1 << 20


@pytest.fixture(params=["real", "shm"])
def folder(request, tmp_path):
    if request.param == "real":
        return tmp_path
    if not os.access(SHM, os.W_OK):
        pytest.skip("no /dev/shm")
    return SHM


def data(nbytes: int, seed: int = 0) -> torch.Tensor:
    return aligned(nbytes).random_(generator=torch.Generator().manual_seed(seed))


def written(disk: Disk, nbytes: int = 2 * PAGE, at: int = 0) -> torch.Tensor:
    x = data(nbytes)
    disk.write(at, x).result()
    return x


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 3 * MIB + 5])
def test_aligned_memory(nbytes):
    x = aligned(nbytes)
    assert x.data_ptr() % PAGE == 0
    assert x.numel() == padded(nbytes) >= nbytes
    assert padded(nbytes) - nbytes < PAGE


@pytest.mark.parametrize("nbytes", [PAGE, CHUNK, 2 * CHUNK + PAGE])
def test_what_was_written_comes_back(folder, nbytes):
    stretches = [data(nbytes, seed) for seed in range(5)]
    with Disk(folder, 5 * nbytes, in_flight=2) as disk:
        for done in [disk.write(i * nbytes, x) for i, x in enumerate(stretches)]:
            done.result()
        back = [aligned(nbytes) for _ in stretches]
        for done in [disk.read(i * nbytes, x) for i, x in reversed(list(enumerate(back)))]:
            done.result()
        written(disk, nbytes, at=nbytes)  # the second time, the second checksum
        disk.read(nbytes, back[1]).result()
    assert torch.equal(back[1], data(nbytes))
    assert all(torch.equal(x, y) for i, (x, y) in enumerate(zip(back, stretches, strict=True)) if i != 1)


def test_any_type_of_number(tmp_path):
    x = data(PAGE).view(torch.bfloat16)
    with Disk(tmp_path, PAGE) as disk:
        disk.write(0, x).result()
        back = aligned(PAGE).view(torch.float32)
        disk.read(0, back).result()
    assert torch.equal(back.view(torch.int32), x.view(torch.int32))


def test_it_goes_past_the_page_cache_where_the_file_system_can(tmp_path):
    try:
        fd = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.preadv(fd, [aligned(PAGE).numpy().data], 0)
        os.close(fd)
    except OSError as error:
        pytest.skip(f"this file system has no O_DIRECT: {error}")
    with Disk(tmp_path, MIB) as disk:
        assert disk.direct


@pytest.mark.parametrize("refused", ["to open", "to use"])
def test_it_goes_through_the_page_cache_where_it_must(tmp_path, monkeypatch, refused):
    def refuse(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open" if refused == "to open" else "preadv", _only_direct(refuse, refused))
        disk = Disk(tmp_path, MIB)
    with disk:
        assert not disk.direct
        x = written(disk)
        back = aligned(2 * PAGE)
        disk.read(0, back).result()
    assert torch.equal(x, back)


def _only_direct(refuse, refused):
    if refused == "to use":
        return refuse
    real = os.open
    return lambda path, flags, *rest: refuse() if flags & os.O_DIRECT else real(path, flags, *rest)


def test_parts_are_continued(tmp_path, monkeypatch):
    """The kernel may move less than it was asked to, and end inside a page."""

    def partly(real):
        def io(fd, views, at):
            return min(5 * PAGE + 100, real(fd, [views[0][: 6 * PAGE]], at))

        return io

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, partly(getattr(os, name)))
    with Disk(tmp_path, MIB) as disk:
        x = written(disk, 20 * PAGE)
        back = aligned(20 * PAGE)
        disk.read(0, back).result()
    assert torch.equal(x, back)


def test_nothing_is_left_behind(tmp_path):
    disk = Disk(tmp_path, MIB)
    assert list(tmp_path.iterdir()) == []
    disk.close()
    disk.close()
    with pytest.raises(UsageError, match="after it was closed"):
        disk.read(0, aligned(PAGE))


def test_who_comes_while_it_is_closed_is_let_in_whole_or_not_at_all(tmp_path, monkeypatch):
    """... and no file is touched after it was closed: another may have its number by then."""
    go, real, closed, outcomes = threading.Event(), os.pwritev, [], []

    def slow(*args):
        assert not closed
        return go.wait(10) and real(*args)

    def write():
        try:
            disk.write(0, data(PAGE)).result()
            outcomes.append("written")
        except UsageError as error:
            outcomes.append("closed" if "after it was closed" in str(error) else error)

    monkeypatch.setattr(os, "pwritev", slow)
    disk = Disk(tmp_path, MIB, threads=2, in_flight=1, timeout_s=10)
    monkeypatch.setattr(disk._file, "close", lambda real=disk._file.close: (closed.append(True), real()))
    calls = [threading.Thread(target=call) for call in (write, write, disk.close, disk.close, write, write)]
    for call in calls:
        call.start()
    go.set()
    for call in calls:
        call.join(20)
    assert not any(call.is_alive() for call in calls)
    assert len(outcomes) == 4
    assert {*outcomes} <= {"written", "closed"}
    assert closed == [True]


def test_the_checksum_sees_every_bit_and_every_page():
    x = data(3 * PAGE)
    whole = checksum(x.numpy().data)
    for at in (0, 7, PAGE + 100, 3 * PAGE - 1):
        for bit in range(8):
            x[at] ^= 1 << bit
            assert checksum(x.numpy().data) != whole
            x[at] ^= 1 << bit
    assert checksum(x.numpy().data) == whole
    swapped = x.view(3, PAGE)[[1, 0, 2]].view(-1)
    assert checksum(swapped.numpy().data) != whole


def test_a_flipped_bit_is_named(folder):
    disk = Disk(folder, 3 * CHUNK)
    written(disk, 3 * CHUNK)
    fd, at = disk._file._plain, CHUNK + 12345
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 16]), at)
    for call in (disk.read(0, aligned(3 * CHUNK)).result, disk.close):
        with pytest.raises(StoreError, match=rf"the {CHUNK} bytes at {CHUNK} of .*/paceline-.*\.state are not those"):
            call()


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ([2, 2], r"a second read agrees: .* \(pages of zeros: 1\)"),
        ([2, None], r"a second read has them: .* \(from page 2 on\)"),
        ([2, 1], r"a second read differs from both: .* \(from page 1 on\)"),
    ],
    ids=["on disk", "once", "always another"],
)
def test_what_differs_is_read_again_and_that_is_said(tmp_path, monkeypatch, spoilt, said):
    """spoilt: the page that is zero in each of the reads."""
    disk, pages, real = Disk(tmp_path, MIB), iter(spoilt), stores.StateFile.read

    def read(self, at, view):
        real(self, at, view)
        if (page := next(pages)) is not None:
            view[page * PAGE :][:PAGE] = bytes(PAGE)

    monkeypatch.setattr(stores.StateFile, "read", read)
    written(disk, 4 * PAGE)
    for call in (disk.read(0, aligned(4 * PAGE)).result, disk.close):
        with pytest.raises(StoreError, match="are not those that were written") as raised:
            call()
        assert re.search(said, raised.value.why)
    assert next(pages, "none") == "none"


def test_a_file_cut_short_is_named(folder):
    disk = Disk(folder, MIB)
    written(disk)
    os.ftruncate(disk._file._plain, PAGE)
    for call in (disk.read(0, aligned(2 * PAGE)).result, disk.close):
        with pytest.raises(StoreError, match=rf"\.state ends at {PAGE}, before {2 * PAGE}"):
            call()


def test_a_failing_disk_is_heard_of_at_the_next_call_and_at_the_end(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    disk = Disk(tmp_path, MIB)
    monkeypatch.setattr(os, "pwritev", fail)
    lost = disk.write(0, data(PAGE))
    assert isinstance(lost.exception(10), StoreError)
    monkeypatch.undo()
    for call in (lambda: disk.write(0, data(PAGE)), lambda: disk.read(0, aligned(PAGE)), disk.close):
        with pytest.raises(StoreError, match=f"writing {PAGE} bytes at 0 of .* failed") as raised:
            call()
        assert "Input/output error" in raised.value.why


def test_the_first_error_is_not_hidden_by_closing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 1 / 0)

    def train():
        with Disk(tmp_path, MIB) as disk:
            disk.write(0, data(PAGE)).exception(10)
            raise KeyError("cause")

    with pytest.raises(KeyError, match="cause"):
        train()


def test_a_disk_that_hangs_does_not_hang_us(tmp_path, monkeypatch):
    go, real = threading.Event(), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *a: go.wait(30) and real(*a))
    disk = Disk(tmp_path, MIB, threads=1, in_flight=2, timeout_s=0.05)
    pending = [disk.write(i * PAGE, data(PAGE)) for i in range(2)]
    for call in (pending[1].result, lambda: disk.write(0, data(PAGE)), disk.close):
        with pytest.raises(StoreError, match="has not ended after 0 s"):
            call()
    go.set()
    for transfer in pending:
        transfer.result(10)


@pytest.mark.parametrize(
    ("at", "n", "said"),
    [(0, PAGE, "a chunk of 8192 bytes"), (PAGE, PAGE, "no chunk"), (0, 4 * PAGE, "a chunk of 8192")],
)
def test_what_was_not_written_cannot_be_read(tmp_path, at, n, said):
    disk = Disk(tmp_path, MIB)
    written(disk, 2 * PAGE)
    for call in (disk.read(at, aligned(n)).result, disk.close):
        with pytest.raises(StoreError, match=said):
            call()


@pytest.mark.parametrize(
    ("at", "x", "said"),
    [
        (1, lambda: data(PAGE), "multiples of 4096"),
        (0, lambda: data(2 * PAGE)[1 : PAGE + 1], "multiples of 4096"),
        (0, lambda: data(PAGE)[:100], "multiples of 4096"),
        (0, lambda: data(PAGE)[:0], "multiples of 4096"),
        (MIB, lambda: data(PAGE), f"the file has {MIB} bytes"),
        (-PAGE, lambda: data(PAGE), f"the file has {MIB} bytes"),
        (0, lambda: data(2 * PAGE)[::2], "not contiguous"),
        (0, lambda: torch.empty(PAGE, device="meta"), "on meta"),
    ],
)
def test_what_is_refused(tmp_path, at, x, said):
    with Disk(tmp_path, MIB) as disk:
        for call in (disk.write, disk.read):
            with pytest.raises(UsageError, match=said):
                call(at, x())
        written(disk)  # and it still works


def test_a_folder_that_is_none_and_sizes_that_are_none(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        Disk(tmp_path / "nowhere", MIB)
    for options in ({"size": 0}, {"size": MIB, "threads": 0}, {"size": MIB, "timeout_s": 0}):
        with pytest.raises(UsageError, match="positive"):
            Disk(tmp_path, **options)


def test_too_little_space_is_said_in_figures(tmp_path, monkeypatch):
    with pytest.raises(StoreError, match=r"needs 1048576.00 GiB, [\d.]+ GiB are free"):
        Disk(tmp_path, 1 << 50)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)  # somebody was faster
    with pytest.raises(StoreError, match=r"needs 0.00 GiB"):
        Disk(tmp_path, MIB)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_small_disk_is_full_before_the_first_step(tmp_path):
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted: {made.stderr.strip()}")
    try:
        with Disk(tmp_path, MIB) as disk:
            written(disk)
            with pytest.raises(StoreError, match=rf"{tmp_path} has no room"):
                Disk(tmp_path, 3 * MIB // 2)  # the first one's space is taken though little of it was written
        Disk(tmp_path, 3 * MIB // 2).close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_killed_process_leaves_nothing(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from paceline.offload.disk import Disk\n"
        "Disk(Path(sys.argv[1]), 1 << 20); os.kill(os.getpid(), 9)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(file.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, timeout=60)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_speed_is_measured(folder, monkeypatch):
    monkeypatch.setattr(stores, "_PROBE", 4 * CHUNK)
    found = speed(folder)
    assert found.read > 0
    assert found.write > 0
