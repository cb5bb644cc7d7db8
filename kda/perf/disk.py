"""How fast a disk gives up records: direct reads of a record's size, in order and at random, several at a time.

A read that goes through the page cache measures memory. Every row therefore says whether the cache was bypassed, and
that is checked twice: the system must take O_DIRECT on a file system that has a disk, and after reading none of the
file may be in the page cache. What the disk itself, or the host of a virtual machine, keeps in memory cannot be seen
from here.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

ALIGNMENT = 4096  # of offset, length and address of a direct read; some disks take 512
MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")  # file systems that are page cache and nothing else
O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux; 0 where there is none
CHUNK = 2**24


@dataclass(frozen=True)
class DiskRow:
    """One measurement. GB is 10^9 bytes; queue_depth threads each wait for one read at a time."""

    pattern: str  # "sequential" or "random"
    record_bytes: int
    queue_depth: int
    bypassed: bool  # False: the page cache was read, and the speed is not the disk's
    why: str  # why not bypassed; empty if it was
    GB_per_s: float
    reads_per_s: float
    us_per_read: float  # median
    us_per_read_p99: float
    bytes_read: int
    seconds: float
    fio_GB_per_s: float | None = None  # what fio measured for the same pattern, size and depth


def eligible(record_bytes: int, offset: int = 0) -> bool:
    """Whether a record of this size at this offset can be read directly, past the page cache."""
    return record_bytes > 0 and record_bytes % ALIGNMENT == 0 and offset % ALIGNMENT == 0


def file_system(path: Path) -> str:
    """The type of the file system that holds `path` (ext4, tmpfs, ...), "unknown" where the system does not tell."""
    try:
        device = path.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return "unknown"


def cached_share(path: Path) -> float | None:
    """Share of a file's pages that the page cache holds, by mincore; None where the system does not tell.

    Linux tells only who may write the file.
    """
    size = path.stat().st_size
    if not size or not os.access(path, os.W_OK):
        return None
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (OSError, AttributeError):
        return None
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        failed = mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
        del view  # or the mapping could not be closed
    return None if failed else float((pages & 1).mean())


def write_file(path: Path, size: int) -> None:
    """`size` bytes that do not compress, on the disk when this returns, and out of the page cache if it may go."""
    block = np.random.default_rng(1).integers(0, 256, CHUNK, np.uint8)
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, CHUNK):
            block[:8] = np.frombuffer(start.to_bytes(8, "little"), np.uint8)  # no two blocks alike
            file.write(block[:min(CHUNK, size - start)].data)
        os.fsync(file.fileno())
    drop_cache(path)


def drop_cache(path: Path) -> None:
    """Asks the system to forget what it cached of a file."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def records_file(where: Path, size: int) -> Iterator[Path]:
    """`where` itself if it is a file; in a folder a new file of `size` bytes, deleted after the block.

    Raises OSError where neither can be.
    """
    if not where.is_dir():
        yield where
        return
    free = shutil.disk_usage(where).free
    if free < 2 * size:
        raise OSError(f"{where}: a test file of {size:,} bytes needs twice that free, {free:,} are; ask for a smaller "
                      "one")
    with tempfile.TemporaryDirectory(prefix=".kda-ceiling-", dir=where) as folder:
        path = Path(folder, "records")
        write_file(path, size)
        yield path


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, str]]:
    """(file descriptor, why reads through it do not bypass the page cache, "" if they should)."""
    kind = file_system(path)
    why = "" if O_DIRECT else "this system has no O_DIRECT"
    try:
        descriptor = os.open(path, os.O_RDONLY | O_DIRECT)
    except OSError as refused:
        if not O_DIRECT or not path.is_file():
            raise
        why = f"O_DIRECT refused ({refused.strerror})"
        descriptor = os.open(path, os.O_RDONLY)
    if kind in MEMORY:
        why = f"{kind} is memory"
    try:
        yield descriptor, why
    finally:
        os.close(descriptor)


def read_records(descriptor: int, record_bytes: int, offsets: Sequence[int], queue_depth: int, seconds: float,
                 most: int | None = None) -> tuple[list[float], float]:
    """(seconds of each read, seconds of all): records at `offsets`, again from the first, for about `seconds`, one
    in each thread at least, but not more than `most`.

    queue_depth threads each read the next record into an aligned buffer of their own. Raises OSError for a short
    read.
    """
    turns = itertools.count()

    def reader() -> list[float]:
        """What one thread does: seconds of each of its reads."""
        taken: list[float] = []
        with mmap.mmap(-1, record_bytes) as buffer:  # page-aligned
            buffer[::mmap.PAGESIZE] = bytes(len(range(0, record_bytes, mmap.PAGESIZE)))  # in memory from the start
            while (now := perf_counter()) < end or not taken:
                turn = next(turns)
                if most is not None and turn >= most:
                    break
                got = os.preadv(descriptor, [buffer], offsets[turn % len(offsets)])
                if got != record_bytes:
                    raise OSError(f"a read of {record_bytes} bytes returned {got}")
                taken.append(perf_counter() - now)
        return taken

    with ThreadPoolExecutor(queue_depth) as pool:
        start = perf_counter()
        end = start + seconds
        times = [t for future in [pool.submit(reader) for _ in range(queue_depth)] for t in future.result()]
        return times, perf_counter() - start


def fio_speed(path: Path, pattern: str, record_bytes: int, queue_depth: int, seconds: float) -> float | None:
    """GB/s that fio measures for the same reads; None without fio, or where it fails."""
    fio = shutil.which("fio")
    if not fio:
        return None
    command = [fio, "--name=kda", f"--filename={path}", f"--rw={'read' if pattern == 'sequential' else 'randread'}",
               f"--bs={record_bytes}", "--ioengine=psync", f"--numjobs={queue_depth}", "--thread", "--direct=1",
               "--readonly", "--time_based", f"--runtime={max(1, round(seconds))}", "--group_reporting",
               "--output-format=json"]
    if pattern == "sequential":
        command.append(f"--offset_increment={100 // queue_depth}%")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + seconds, check=True)
        return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"]) / 1e9
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError):
        return None


def measure(where: str | os.PathLike[str], record_bytes: int = 2**22, queue_depths: Sequence[int] = (1, 4, 16),
            seconds: float = 1.0, file_bytes: int = 2**30, referee: bool = True,
            progress: Callable[[int, int, str], None] | None = None) -> list[DiskRow]:
    """Read records from a file, or in a folder from a new file of about file_bytes, which is deleted afterwards.

    Sequential and random, each at every queue depth for about `seconds`; the last depth of each pattern also with
    fio, where that is installed and the cache was bypassed.

    Raises OSError for a path that cannot be read, or without room; ValueError for a record size that is no multiple
    of 4096, or a file smaller than a record.
    """
    if not eligible(record_bytes):
        raise ValueError(f"record_bytes: direct reads need a multiple of {ALIGNMENT}, got {record_bytes}")
    if not queue_depths or min(queue_depths) < 1:
        raise ValueError(f"queue_depths: expected numbers >= 1, got {list(queue_depths)}")
    rows: list[DiskRow] = []
    if progress:
        progress(0, 2 * len(queue_depths), "writing the test file")
    with records_file(Path(where), -(-max(file_bytes, 4 * record_bytes) // record_bytes) * record_bytes) as path:
        records = path.stat().st_size // record_bytes
        if not records:
            raise ValueError(f"{path}: smaller than one record of {record_bytes:,} bytes")
        drop_cache(path)
        in_order = [i * record_bytes for i in range(records)]
        shuffled = [in_order[i] for i in np.random.default_rng(2).permutation(records)]
        for pattern, offsets in (("sequential", in_order), ("random", shuffled)):
            for depth in queue_depths:
                if progress:
                    progress(len(rows), 2 * len(queue_depths), f"{pattern}, queue depth {depth}")
                with opened(path) as (descriptor, why):
                    times, taken = read_records(descriptor, record_bytes, offsets, depth, seconds)
                    share = cached_share(path)
                if not why and share is not None and share > 0.01:
                    why = f"{share:.0%} of the file were in the page cache afterwards"
                fio = None
                if referee and not why and depth == queue_depths[-1]:
                    fio = fio_speed(path, pattern, record_bytes, depth, seconds)
                rows.append(DiskRow(
                    pattern, record_bytes, depth, not why, why, len(times) * record_bytes / taken / 1e9,
                    len(times) / taken, 1e6 * float(np.median(times)), 1e6 * float(np.quantile(times, 0.99)),
                    len(times) * record_bytes, taken, fio))
    if progress:
        progress(len(rows), len(rows), "done")
    return rows


def fastest(rows: Sequence[DiskRow]) -> DiskRow:
    """The row to plan with: the fastest random reads past the page cache, or if there are none, the fastest of all."""
    return max(rows, key=lambda row: (row.bypassed, row.pattern == "random", row.GB_per_s))


def to_dicts(rows: Sequence[DiskRow]) -> list[dict[str, Any]]:
    """The rows for JSON."""
    return [asdict(row) for row in rows]
