"""Group-quantised weight matrices and their products with int8 activations (IDOT)."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from kda import _core
from kda.files import Safetensors, replacing, safetensors_header
from kda.ops import (
    _BF16,
    _F16,
    _F32,
    _U16,
    Array,
    _array,
    _described,
    _input,
    _output,
    _shape_error,
    aligned_bytes,
)
from kda.runtime import isa_index, isas

_BITS = (8, 4)
_GROUPS = (32, 64, 128)
_FORMAT = "kda-quantized-matrix"  # in the metadata of saved files
_CHUNK = 1 << 23  # bytes of canonical codes made, read or written at a time: two or three such parts are in memory


class QuantizedMatrix:
    """A matrix [N, K] of int8 or int4 codes with a float16 scale for each row and group of `group_size` columns.

    The canonical form is Q8G (8 bits, 8.125 bits a weight with groups of 128) and Q4G (4 bits, 4.125):

        codes   int8 [N, Kp], or uint8 [N, Kp / 2]: two codes plus 8 in a byte, the lower column in the low nibble
        scales  float16 [N, Kp / group_size]

    with Kp = K padded with zeros to whole groups; a weight is code * scale. In memory the codes lie packed for one
    ISA, once; `codes` and `scales` give the canonical form back, bit for bit. Made by `quantize`, `from_codes`,
    `from_gguf`, `concatenate` or `load`.

    Attributes: shape (N, K), bits, group_size, isa (the ISA it is packed for), nbytes (of the packed form).
    """

    def __init__(self, packed_codes: NDArray[np.uint8], packed_scales: NDArray[np.uint16], shape: tuple[int, int],
                 bits: int, group_size: int, isa: str) -> None:
        """For the class methods: arrays as the core packs them."""
        self._codes, self._scales = packed_codes, packed_scales
        self.shape, self.bits, self.group_size, self.isa = shape, bits, group_size, isa
        self._row = isa_index(isa)
        # matmul for the layer, into(y, x): y [T, N] float32, rows contiguous, nothing checked but by the core
        self.into = _core.Matrix(self._row, packed_codes, packed_scales, *shape, group_size, bits).multiply

    # ---- making ----

    @classmethod
    def quantize(cls, w: Array, bits: int = 8, group_size: int = 128, *, isa: str | None = None) -> QuantizedMatrix:
        """Quantise w [N, K] (float32, float16 or bfloat16): scale = max|w| / 127 (8 bits) or / 7 (4 bits) in
        float16, code = w / scale to nearest, so that |w - code * scale| <= scale / 2 for every weight.

        Where a subnormal scale would round down too far for that, the next one up is taken.

        Raises TypeError for float64 or integers; ValueError for shapes, bits or group_size, and for a group whose
        scale float16 cannot hold (NaN, infinity, too large), with its row and group.
        """
        w = _input("w", w)
        if w.ndim != 2 or w.size == 0:
            raise _shape_error("w", w, ["N >= 1", "K >= 1"])
        N, K = w.shape
        self = cls._blank((N, K), bits, group_size, isa)
        bad = np.empty(-(-N // _core.matrix_layout(self._row)[0]), np.int64)
        _core.matrix_encode(self._row, self._codes, self._scales, bad, w, group_size, bits)
        if (bad >= 0).any():
            groups = -(-K // group_size)
            row, group = divmod(int(bad[bad >= 0][0]), groups)
            part = np.asarray(w)[row, group * group_size:(group + 1) * group_size]
            largest = np.abs(part.view(_BF16) if part.dtype == _U16 else part).astype(np.float64).max()
            raise ValueError(f"w: row {row}, group {group} (columns {group * group_size} to "
                             f"{min(K, (group + 1) * group_size) - 1}) has max|w| = {largest:g}, whose scale is not a "
                             f"finite float16; expected finite weights up to {65504 * (127 if bits == 8 else 7):g}")
        return self

    @classmethod
    def from_codes(cls, codes: Array, scales: Array, shape: Sequence[int], bits: int = 8, group_size: int = 128, *,
                   isa: str | None = None) -> QuantizedMatrix:
        """From the canonical form, read-only and memory-mapped arrays included; they are read once and not kept.

        codes : int8 [N, Kp] (8 bits) or uint8 [N, Kp / 2] (4 bits); a flat array of as many bytes is taken too, and
            uint8 for int8. scales : float16 [N, Kp / group_size], or its bits as uint16. shape : (N, K).

        Raises TypeError for other dtypes, ValueError for shapes that do not fit.
        """
        N, K = _shape(shape)
        _check_form(bits, group_size)
        codes, scales = _array("codes", codes), _array("scales", scales)
        _check_canonical(codes, scales, (N, K), bits, group_size)
        codes, scales = codes.reshape(N, -1), scales.reshape(N, -1)

        def rows(first: int, last: int) -> tuple[Array, Array]:
            part, its_scales = codes[first:last], scales[first:last]
            if part.strides[1] != 1:
                part = np.ascontiguousarray(part)
            if not (its_scales.flags.c_contiguous and its_scales.flags.aligned and its_scales.dtype.isnative):
                its_scales = np.array(its_scales, dtype=its_scales.dtype.newbyteorder("="), order="C")
            return part, its_scales

        return cls._packed((N, K), bits, group_size, isa, rows)

    @classmethod
    def from_gguf(cls, data: Array, shape: Sequence[int], quantization: str, *,
                  isa: str | None = None) -> QuantizedMatrix:
        """From the blocks of a GGUF tensor: "Q8_0" or "Q4_0", both groups of 32.

        data : uint8, N * K / 32 blocks of 34 or 18 bytes, in any shape: `tensor.data` of the gguf package's reader.
        shape : (N, K); the reader's `tensor.shape` is the other way round. K is a multiple of 32.

        Raises ValueError for another quantisation or a size that does not fit.
        """
        sizes = {"Q8_0": 34, "Q4_0": 18}
        if not isinstance(quantization, str) or quantization not in sizes:
            raise ValueError(f"quantization: expected 'Q8_0' or 'Q4_0', got {quantization!r}")
        N, K = _shape(shape)
        data = _array("data", data)
        size = sizes[quantization]
        if data.dtype != np.uint8 or K % 32 or data.size != N * K // 32 * size:
            raise ValueError(f"data: expected uint8 of {N} x {K} / 32 blocks of {size} bytes, got {_described(data)}")
        blocks = data.reshape(N, K // 32, size)

        def rows(first: int, last: int) -> tuple[Array, Array]:
            part = blocks[first:last]
            scales = np.ascontiguousarray(part[:, :, :2]).view("<f2")[:, :, 0].astype(_F16)
            codes = part[:, :, 2:]
            if quantization == "Q4_0":  # byte i: code i in its low nibble, code i + 16 in its high one
                each = np.concatenate([codes & 15, codes >> 4], axis=2)
                codes = each[:, :, 0::2] | each[:, :, 1::2] << 4
            return np.ascontiguousarray(codes).reshape(last - first, -1), scales

        return cls._packed((N, K), 8 if size == 34 else 4, 32, isa, rows)

    @classmethod
    def concatenate(cls, matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
        """The rows of several matrices of one K, bits and group_size as one matrix: projections that share an input
        quantise it once and are one call. Raises ValueError where they differ."""
        if not matrices:
            raise ValueError("matrices: expected at least one")
        first = matrices[0]
        for i, m in enumerate(matrices):
            if (m.shape[1], m.bits, m.group_size) != (first.shape[1], first.bits, first.group_size):
                raise ValueError(f"matrices[{i}]: expected K, bits, group_size = {first.shape[1]}, {first.bits}, "
                                 f"{first.group_size}, got {m.shape[1]}, {m.bits}, {m.group_size}")
        N = sum(m.shape[0] for m in matrices)
        lanes = _core.matrix_layout(first._row)[0]
        if all(m.isa == first.isa and m.shape[0] % lanes == 0 for m in matrices):  # whole tiles: they just follow
            self = cls._blank((N, first.shape[1]), first.bits, first.group_size, first.isa)
            np.concatenate([m._codes for m in matrices], out=self._codes)
            np.concatenate([m._scales for m in matrices], out=self._scales)
            return self

        def rows(low: int, high: int) -> tuple[Array, Array]:
            parts, start = [], 0
            for m in matrices:
                end = start + m.shape[0]
                if start < high and low < end:
                    parts.append(m._canonical(max(low, start) - start, min(high, end) - start))
                start = end
            return np.concatenate([codes for codes, _ in parts]), np.concatenate([scales for _, scales in parts])

        return cls._packed((N, first.shape[1]), first.bits, first.group_size, first.isa, rows)

    @classmethod
    def _packed(cls, shape: tuple[int, int], bits: int, group_size: int, isa: str | None,
                rows: Callable[[int, int], tuple[Array, Array]]) -> QuantizedMatrix:
        """From rows(first, last): canonical codes and scales of some rows, in native order and C-contiguous. It is
        called for about _CHUNK bytes of codes at a time, so the memory that it takes does not grow with the matrix."""
        self = cls._blank(shape, bits, group_size, isa)
        for first, last in self._chunks():
            codes, scales = rows(first, last)
            _core.matrix_pack(self._row, *self._tiles(first, last), codes, scales.view(_U16), shape[1], group_size,
                              bits, False)
        return self

    @classmethod
    def _blank(cls, shape: tuple[int, int], bits: int, group_size: int, isa: str | None) -> QuantizedMatrix:
        """Uninitialised, of the right sizes; the codes start as aligned_bytes does."""
        _check_form(bits, group_size)
        row = isa_index(isa)
        lanes = _core.matrix_layout(row)[0]
        tiles, groups = -(-shape[0] // lanes), -(-shape[1] // group_size)
        size = tiles * lanes * groups * group_size * bits // 8
        memory = aligned_bytes(size + 2 * tiles * lanes * groups)  # the scales behind the codes
        return cls(memory[:size], memory[size:].view(np.uint16), shape, bits, group_size, list(isas())[row])

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """All rows as ranges [first, last) of whole tiles, of about _CHUNK bytes of codes."""
        lanes, row_bytes, _ = self._sizes()
        step = max(_CHUNK // row_bytes // lanes, 1) * lanes
        for first in range(0, self.shape[0], step):
            yield first, min(first + step, self.shape[0])

    def _sizes(self) -> tuple[int, int, int]:
        """(rows of a tile, bytes of a row of canonical codes, groups of a row)."""
        groups = -(-self.shape[1] // self.group_size)
        return _core.matrix_layout(self._row)[0], groups * self.group_size * self.bits // 8, groups

    def _tiles(self, first: int, last: int) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
        """The packed codes and scales of the tiles that hold rows [first, last); `first` begins one."""
        lanes, row_bytes, groups = self._sizes()
        end = -(-last // lanes) * lanes
        return self._codes[first * row_bytes:end * row_bytes], self._scales[first * groups:end * groups]

    # ---- using ----

    def matmul(self, x: Array, out: NDArray[np.float32] | None = None) -> Array:
        """x [..., K] times the transpose: [..., N], in x's dtype.

        x (float32, float16 or bfloat16) is quantised by token and group to int8, scale max|x| / 127, to nearest,
        ties to even; products are summed exactly in int32 within a group, then scaled and summed in float32 group
        by group. The result has the same bits on every ISA and for any number of threads. A NaN or infinity in a
        token's x makes that token's outputs NaN.

        out : float32 C-contiguous [..., N] to write into (x float32); it is returned.

        Raises TypeError for float64 or integers; ValueError for shapes, or an `out` that cannot be written. Ctrl-C ends
        a long call; then only part of `out` is written.
        """
        N, K = self.shape
        x = _input("x", x)
        if x.ndim < 1 or x.shape[-1] != K:
            raise _shape_error("x", x, ["...", K])
        shape = (*x.shape[:-1], N)
        if out is None:
            y = np.empty(shape, np.float32)
        else:
            if x.dtype != _F32:
                raise TypeError(f"out: is float32 and needs float32 x, got {x.dtype if x.dtype != _U16 else _BF16}")
            y = _output("out", out, shape, _F32, {"x": x}, inner=len(shape))
        self.into(y.reshape(-1, N), x.reshape(-1, K))
        if out is not None:
            return out
        return y if x.dtype == _F32 else y.astype(_BF16 if x.dtype == _U16 else _F16)

    @property
    def codes(self) -> Array:
        """Canonical codes, a new array: int8 [N, Kp], or uint8 [N, Kp / 2]."""
        return self._canonical()[0]

    @property
    def scales(self) -> NDArray[np.float16]:
        """Canonical scales, a new array: float16 [N, Kp / group_size]."""
        return self._canonical()[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed codes and scales."""
        return self._codes.nbytes + self._scales.nbytes

    def dequantize(self) -> NDArray[np.float32]:
        """code * scale as float32 [N, K]."""
        codes, scales = self._canonical()
        if self.bits == 4:
            pairs = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)
            codes = pairs.astype(np.int8) - np.int8(8)
        grouped = codes.reshape(*scales.shape, self.group_size) * scales.astype(np.float32)[:, :, None]
        return np.ascontiguousarray(grouped.reshape(self.shape[0], -1)[:, :self.shape[1]])

    def _canonical(self, first: int = 0, last: int | None = None) -> tuple[Array, NDArray[np.float16]]:
        """Canonical codes and scales of rows [first, last), all by default."""
        last = self.shape[0] if last is None else last
        lanes, row_bytes, groups = self._sizes()
        start = first // lanes * lanes
        codes = np.empty((last - start, row_bytes), np.uint8)
        scales = np.empty((last - start, groups), np.uint16)
        _core.matrix_pack(self._row, *self._tiles(start, last), codes, scales, self.shape[1], self.group_size,
                          self.bits, True)
        codes, scales = codes[first - start:], scales[first - start:]
        return codes.view(np.int8) if self.bits == 8 else codes, scales.view(np.float16)

    def __repr__(self) -> str:
        return (f"QuantizedMatrix(shape={self.shape}, bits={self.bits}, group_size={self.group_size}, "
                f"isa={self.isa!r}, nbytes={self.nbytes})")

    # ---- keeping ----

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the canonical form as safetensors, some 16 MiB at a time: a file written on one ISA loads on any.

        The file is written beside `path` and renamed onto it: a crash leaves the old file or the new one. Raises
        OSError where it cannot be written; the old file is untouched then.
        """
        N, (_, row_bytes, groups) = self.shape[0], self._sizes()
        header = safetensors_header(
            {"format": _FORMAT, "version": "1", "shape": f"{N},{self.shape[1]}", "bits": str(self.bits),
             "group_size": str(self.group_size)},
            {"codes": ("I8" if self.bits == 8 else "U8", (N, row_bytes), N * row_bytes),
             "scales": ("F16", (N, groups), 2 * N * groups)})
        start, codes_end = len(header), N * row_bytes
        with replacing(path) as file:
            file.write(header)
            for first, last in self._chunks():  # safetensors' own writer wants all of it in memory
                codes, scales = self._canonical(first, last)
                file.seek(start + first * row_bytes)
                file.write(codes.data)
                file.seek(start + codes_end + first * 2 * groups)
                file.write(scales.astype("<f2", copy=False).data)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, isa: str | None = None) -> QuantizedMatrix:
        """Read what `save` wrote, some 16 MiB at a time. Raises OSError, and ValueError for a file of another kind,
        version or shape, or that is cut short, also meanwhile."""
        from safetensors import SafetensorError

        isa_index(isa)
        try:
            with Safetensors(path) as file:
                about = file.metadata
                if about.get("format") == _FORMAT and about.get("version") == "1":
                    N, K = (int(n) for n in about["shape"].split(","))
                    bits, group_size = int(about["bits"]), int(about["group_size"])
                    _check_form(bits, group_size)
                    groups = -(-K // group_size)
                    shapes = [file.about(name)[1] for name in ("codes", "scales")]
                    expected = [[N, groups * group_size * bits // 8], [N, groups]]
                    if N < 1 or K < 1 or shapes != expected:
                        raise ValueError(f"codes, scales: expected {expected} for shape {(N, K)}, got {shapes}")

                    def rows(first: int, last: int) -> tuple[Array, Array]:
                        codes, scales = (file.read(name, first, last) for name in ("codes", "scales"))
                        _check_canonical(codes, scales, (last - first, K), bits, group_size)
                        return codes, scales

                    return cls._packed((N, K), bits, group_size, isa, rows)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: is not a complete {_FORMAT} file: {error}") from error
        raise ValueError(f"{path}: expected a {_FORMAT} file of version 1, got {about or 'no metadata'}")


def _check_canonical(codes: Array, scales: Array, shape: tuple[int, int], bits: int, group_size: int) -> None:
    """TypeError or ValueError if these are not the canonical form of a matrix of `shape`, flat or not."""
    N, K = shape
    groups = -(-K // group_size)
    row_bytes = groups * group_size * bits // 8
    if codes.dtype.itemsize != 1 or codes.dtype.kind not in "iu" or (bits == 4 and codes.dtype.kind != "u"):
        raise TypeError(f"codes: expected {'int8' if bits == 8 else 'uint8'}, got {_described(codes)}")
    if scales.dtype.newbyteorder("=") not in (_F16, _U16):
        raise TypeError(f"scales: expected float16, got {_described(scales)}")
    if codes.shape not in ((N, row_bytes), (N * row_bytes,)):
        raise _shape_error("codes", codes, (N, row_bytes), f" for shape {(N, K)} in groups of {group_size}")
    if scales.shape not in ((N, groups), (N * groups,)):
        raise _shape_error("scales", scales, (N, groups), f" for shape {(N, K)} in groups of {group_size}")


def _shape(shape: Sequence[int]) -> tuple[int, int]:
    """(N, K) of a caller."""
    try:
        N, K = (operator.index(n) for n in shape)
    except (TypeError, ValueError):
        N = K = 0
    if N < 1 or K < 1:
        raise ValueError(f"shape: expected (N >= 1, K >= 1), two integers, got {shape!r}")
    return N, K


def _check_form(bits: int, group_size: int) -> None:
    if not isinstance(bits, Integral) or bits not in _BITS:
        raise ValueError(f"bits: expected 8 or 4, got {bits!r}")
    if not isinstance(group_size, Integral) or group_size not in _GROUPS:
        raise ValueError(f"group_size: expected one of 32, 64, 128, got {group_size!r}")
