"""Dense float32 weight matrices whose products do not depend on what else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kda import _core
from kda.ops import Array, _input, _shape_error, aligned_empty
from kda.runtime import isa_index, isas


class DenseMatrix:
    """A matrix [N, K] of float32, packed for one ISA: the counterpart of QuantizedMatrix for the layer.

    A BLAS gives a row other bits when its neighbours change; here a token's result is the same alone, in any batch
    and on any number of threads, which is what makes padded batches, pools and rollback exact.
    """

    def __init__(self, parts: Sequence[Array], isa: str | None = None) -> None:
        """The rows of `parts`, each [n, K] float32, float16 or bfloat16, one after the other."""
        self._row = isa_index(isa)
        self.isa = list(isas())[self._row]
        rows = [_input(f"parts[{i}]", part) for i, part in enumerate(parts)]
        K = rows[0].shape[1]
        for i, part in enumerate(rows):
            if part.ndim != 2 or part.shape[1] != K or part.size == 0:
                raise _shape_error(f"parts[{i}]", part, ["n >= 1", K])
        self.shape = (sum(len(part) for part in rows), K)
        lanes = _core.dense_lanes(self._row)
        self._panels: NDArray[np.float32] = aligned_empty((-(-self.shape[0] // lanes) * lanes * K,))
        first = 0
        for part in rows:
            _core.dense_pack(self._row, self._panels, part, self.shape[0], first)
            first += len(part)
        # into(y, x): y [T, N] = x [T, K] times the transpose; rows contiguous, nothing checked but by the core
        self.into = _core.Dense(self._row, self._panels, *self.shape).multiply

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self._panels.nbytes

