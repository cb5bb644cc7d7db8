"""The states of a model's KDA layers together: one conversation, or a batch of them, that can be kept in a file."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kda import _core
from kda.config import KDAConfig
from kda.files import replacing, safetensors_header
from kda.ops import Array
from kda.state import MOST_POSITION, KDAState, exclusive

_FORMAT, _VERSION = "kda-session", "1"
_LAYOUT = "recurrent B,HV,K,V; conv B,D,W-1 oldest first"
_MOST_HEADER = 1 << 24  # bytes; ours are some kB
_NAMES = {np.dtype(np.float32): "F32", np.dtype(np.uint16): "BF16"}


class Session:
    """The state of every KDA layer of a model for `batch` sequences.

    config : KDAConfig. batch, rollback_window, state_dtype : as KDAState has them.

        session.layers[i]      the KDAState of the i-th KDA layer, counted from 0 among the KDA layers

    Attributes: config, batch, rollback_window, state_dtype. Attention layers' caches are the model's own affair.
    """

    def __init__(self, config: KDAConfig, batch: int = 1, rollback_window: int = 0,
                 state_dtype: str = "float32") -> None:
        if not config.kda_layers:
            raise ValueError("config: has no KDA layers")
        self._hold(config, [KDAState(config, batch, rollback_window, state_dtype) for _ in config.kda_layers])

    def _hold(self, config: KDAConfig, layers: Sequence[KDAState]) -> None:
        self.config, self.layers = config, tuple(layers)
        first = self.layers[0]
        self.batch, self.rollback_window, self.state_dtype = first.batch, first.rollback_window, first.state_dtype

    @classmethod
    def _of(cls, config: KDAConfig, layers: Sequence[KDAState]) -> Session:
        session = cls.__new__(cls)
        session._hold(config, layers)
        return session

    # ---- what it holds ----

    @property
    def positions(self) -> NDArray[np.int64]:
        """Tokens that each row has taken, [B]. Raises RuntimeError where the layers do not agree, as between two
        layers of a forward pass."""
        positions = self.layers[0].positions
        for i, layer in enumerate(self.layers):
            if not np.array_equal(layer.positions, positions):
                raise RuntimeError(f"layer {i} is at position {layer.position}, layer 0 at {self.layers[0].position}: "
                                   "a forward pass is under way, or was given up")
        return positions

    @property
    def position(self) -> int | NDArray[np.int64]:
        """Tokens taken: an int where all rows have taken as many, else `positions`."""
        positions = self.positions
        return int(positions[0]) if (positions == positions[0]).all() else positions

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' states, and of what they keep for a rollback."""
        return sum(layer.nbytes for layer in self.layers)

    def __repr__(self) -> str:
        where = ", ".join(str(p) for p in sorted({str(layer.position) for layer in self.layers}))
        return (f"Session({self.config.identity}, {len(self.layers)} layers, batch={self.batch}, position={where}, "
                f"state_dtype={self.state_dtype!r}, nbytes={self.nbytes})")

    # ---- what can be done with it ----

    def fork(self) -> Session:
        """An independent session that goes on as this one would, rollback included."""
        return self.select(range(self.batch))

    copy = fork
    __copy__ = fork

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return self.fork()

    def select(self, rows: Sequence[int]) -> Session:
        """A new session whose rows are copies of these rows: the beams that are left, a batch taken apart."""
        with exclusive(*self.layers):
            return Session._of(self.config, [layer.selected(rows) for layer in self.layers])

    def reset(self) -> None:
        """Back to zeros and position 0."""
        with exclusive(*self.layers):
            parts = [layer.cleared() for layer in self.layers]
            _core.commit([copy for copies, _ in parts for copy in copies],
                         [change for _, changes in parts for change in changes])

    def rollback(self, n: int | Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Drop the last n tokens of every row, or n[b] of row b, in every layer; see KDAState.rollback. Raises
        ValueError for more than can be dropped, and leaves all layers as they are. A MemoryError or a signal on the way
        may leave layers at different positions."""
        with exclusive(*self.layers):
            counts = [layer.checked_rollback(n, f"layer {i}, ") for i, layer in enumerate(self.layers)]
            for layer, each in zip(self.layers, counts, strict=True):
                layer.rollback_rows(each)

    # ---- keeping ----

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the states, without what a rollback needs, as safetensors with metadata and a SHA-256 over every byte.

        The file is written beside `path` and renamed onto it, so that a crash at any moment leaves the old file or
        the new one, with the permissions of the old one. A symbolic link is followed. Raises OSError where it cannot
        be written (the old file is untouched), RuntimeError between two layers of a forward pass.
        """
        import hashlib

        with exclusive(*self.layers):
            arrays = {name: array for i, layer in enumerate(self.layers) for name, array in _tensors(i, layer).items()}
            head = _header(self, self.positions.tolist())
            digest = hashlib.sha256()
            with replacing(path) as file:
                digest.update(head)
                file.write(head)
                for array in arrays.values():
                    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                    digest.update(data)
                    file.write(data)
                file.seek(head.index(_BLANK))
                file.write(digest.hexdigest().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: KDAConfig, rollback_window: int = 0) -> Session:
        """A session as `save` left it; it goes on bit for bit as that one did. rollback_window: for what comes.

        The file is read once, into the new session, and checked whole. Raises FileNotFoundError, and ValueError with
        the reason for a file that is truncated, longer, altered in any byte, or of another format version, model, gate,
        shape, layout or dtype.
        """
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise ValueError(f"{path}: is no saved session: {size} bytes")
            return cls._read(file, size, config, rollback_window, _refuser(path))

    @classmethod
    def _read(cls, file: BinaryIO, size: int, config: KDAConfig, rollback_window: int,
              refuse: Callable[[str], ValueError]) -> Session:
        import hashlib

        start = file.read(8)
        length = int.from_bytes(start, "little")
        if length > min(size - 8, _MOST_HEADER):
            raise refuse(f"its header has {length} bytes, the file {size}: truncated, or no safetensors")
        head = start + file.read(length)
        try:
            about = json.loads(head[8:])["__metadata__"]
            kind = about["format"]
            version, digest = about["version"], about["sha256"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise refuse("its header is not that of a saved session") from error
        if kind != _FORMAT or version != _VERSION:
            raise refuse(f"expected format {_FORMAT!r} of version {_VERSION!r}, got {_short(kind)} of version "
                         f"{_short(version)}")
        wanted = _about(config, about.get("state_dtype"), about.get("batch"), about.get("positions"))
        for key, value in wanted.items():
            if about.get(key) != value:
                raise refuse(f"{key}: expected {_short(value)}, got {_short(about.get(key))}")
        try:
            batch, positions = int(about["batch"]), json.loads(about["positions"])
            if len(positions) != batch or any(type(p) is not int or not 0 <= p <= MOST_POSITION for p in positions):
                raise ValueError("positions")
            session = cls.__new__(cls)
            promised = _size(config, batch, about["state_dtype"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise refuse(f"bad batch, positions or state_dtype in its metadata: {error}") from error
        if size != 8 + length + promised:
            raise refuse(f"expected {8 + length + promised} bytes, got {size}: "
                         f"{'truncated' if size < 8 + length + promised else 'something was appended'}")
        session._hold(config, [KDAState(config, batch, rollback_window, about["state_dtype"])
                               for _ in config.kda_layers])
        expected = _header(session, positions)
        if head.replace(str(digest).encode(errors="replace"), _BLANK, 1) != expected:
            raise refuse("its header was altered: tensors, shapes or metadata are not those of such a session")
        whole = hashlib.sha256(expected)
        for i, layer in enumerate(session.layers):
            for array in _tensors(i, layer).values():
                part = file.read(array.nbytes)  # one tensor at a time
                if len(part) != array.nbytes:
                    raise refuse("it became shorter while it was read")
                whole.update(part)
                array[...] = np.frombuffer(part, array.dtype).reshape(array.shape)
            for row, position in zip(layer.rows, positions, strict=True):
                row.position = position
        if whole.hexdigest() != digest:
            raise refuse("its checksum does not match its contents: some byte was altered")
        return session


_BLANK = b"0" * 64  # where the checksum will stand, while it is computed


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_short = _SHORT.repr  # of what a hostile header says


def _refuser(path: str | os.PathLike[str]) -> Callable[[str], ValueError]:
    return lambda why: ValueError(f"{os.fspath(path)}: refused: {why}")


def _tensors(i: int, layer: KDAState) -> dict[str, Array]:
    """Views of layer i's current state by the names of the file; bfloat16 as its bits."""
    parts = dict(zip(("recurrent", "conv_q", "conv_k", "conv_v"), layer.current(), strict=True))
    return {f"layers.{i}.{name}": array for name, array in parts.items()}


def _about(config: KDAConfig, state_dtype: Any, batch: Any, positions: Any) -> dict[str, str]:
    """The metadata of a file."""
    gate = config.gate if config.gate_lower_bound is None else f"{config.gate} {config.gate_lower_bound}"
    return {"format": _FORMAT, "version": _VERSION, "model": config.identity, "gate": gate,
            "shape": f"{len(config.kda_layers)} layers, H {config.num_heads}, HV {config.num_v_heads}, "
                     f"K {config.head_dim}, V {config.v_head_dim}, W {config.conv_size}",
            "layout": _LAYOUT, "state_dtype": state_dtype, "batch": batch, "positions": positions}


def _header(session: Session, positions: Sequence[int]) -> bytes:
    """The first bytes of the file, as safetensors has them, with _BLANK for the checksum. The same session gives the
    same bytes, so that an altered one can be told even where it still parses."""
    about = _about(session.config, session.state_dtype, str(session.batch), json.dumps(list(positions)))
    tensors = {name: (_NAMES[array.dtype], array.shape, array.nbytes)
               for i, layer in enumerate(session.layers) for name, array in _tensors(i, layer).items()}
    return safetensors_header(about | {"sha256": _BLANK.decode()}, tensors)


def _size(config: KDAConfig, batch: int, state_dtype: str) -> int:
    """Bytes of all tensors."""
    if batch < 1 or state_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"batch {batch}, state_dtype {state_dtype!r}")
    HV, K, V = config.num_v_heads, config.head_dim, config.v_head_dim
    recurrent = HV * K * V * (4 if state_dtype == "float32" else 2)
    histories = (config.conv_size - 1) * (2 * config.num_heads * K + HV * V) * 4
    return batch * len(config.kda_layers) * (recurrent + histories)
