"""Files that are written whole or not at all, and safetensors that are read without being mapped."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pathlib import Path

_DTYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "U8": "u1", "I16": "<i2", "U16": "<u2", "I32": "<i4",
           "U32": "<u4", "I64": "<i8", "U64": "<u8", "BOOL": "?"}


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file to write, which takes the place of `path` at the end of the block, with the old one's permissions.

    It is written beside `path`, brought to disk and renamed, so that a crash at any moment leaves the old file or the
    new one. Where the block or the writing fails, the old one is as it was and nothing else is left. A symbolic link is
    followed. Raises OSError, IsADirectoryError for a directory, and OSError (EINVAL) for a device, pipe or socket.
    """
    import secrets
    import shutil
    from pathlib import Path

    path = Path(os.path.realpath(path))
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "expected the name of a file, not of a device, pipe or socket", str(path))
    beside = path.with_name(f".{path.name[:40]}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with open(beside, "xb") as file:
            with contextlib.suppress(FileNotFoundError):
                shutil.copymode(path, beside)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(folder: Path) -> None:
    """The rename itself on disk, where the system can do that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def safetensors_header(metadata: Mapping[str, str], tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> bytes:
    """What a safetensors file begins with, for {name: (dtype, shape, bytes)} whose data follow in that order. The
    library's own writer wants all data in memory, and gives metadata no order."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Safetensors:
    """A safetensors file that is open, as a context. Its header is checked by the safetensors library; tensors are
    read, not mapped as the library does: whoever cuts a mapped file short ends the program (SIGBUS).

    Attributes: metadata, names. Raises OSError, safetensors.SafetensorError, and ValueError for a file that has become
    another meanwhile.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from safetensors import safe_open

        self._file = open(path, "rb")  # noqa: SIM115 - closed by __exit__
        try:
            with safe_open(path, framework="numpy") as checked:
                self.metadata: dict[str, str] = checked.metadata() or {}
                self.names: list[str] = list(checked.keys())
            self._start = 8 + int.from_bytes(self._file.read(8), "little")
            self._table = json.loads(self._file.read(self._start - 8))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Safetensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def about(self, name: str) -> tuple[str, list[int]]:
        """(dtype as the format calls it, shape) of a tensor; KeyError where there is none of that name."""
        entry = self._table[name]
        return entry["dtype"], entry["shape"]

    def read(self, name: str, first: int = 0, last: int | None = None) -> NDArray[Any]:
        """A tensor, or its rows [first, last), in native byte order. Raises KeyError for another name, TypeError for a
        dtype that numpy does not have, ValueError for a file that ends too early."""
        kind, shape = self.about(name)
        if kind != "BF16" and kind not in _DTYPES:
            raise TypeError(f"{name}: expected a dtype of numpy or BF16, got {kind}")
        dtype = np.dtype(ml_dtypes.bfloat16 if kind == "BF16" else _DTYPES[kind])
        row = math.prod(shape[1:]) * dtype.itemsize
        if shape and (first or last is not None):
            shape = [(shape[0] if last is None else last) - first, *shape[1:]]
        x = np.empty(shape, dtype)
        self._file.seek(self._start + self._table[name]["data_offsets"][0] + first * row)
        if self._file.readinto(x.reshape(-1).view(np.uint8).data) != x.nbytes:
            raise ValueError(f"{name}: the file ends in the middle of it")
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
