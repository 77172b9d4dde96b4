"""The decorator of functions that Numba compiles, and the type of their arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from dragoman.errors import UserError

try:
    from numba import njit
except ImportError:
    raise UserError("word alignment and phrase-based models need an extra: pip install 'dragoman[smt]'") from None

Array = np.ndarray[Any, Any]
F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function when it is first called, and cache its code on disk. It runs without the GIL.

    Sums may be computed in another order, which lets the compiler use vector instructions.
    """
    compile_function = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
    return cast(F, compile_function(function))
