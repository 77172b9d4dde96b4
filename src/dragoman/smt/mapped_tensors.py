"""Memory-mapped safetensors files: they are checked when opened, but not copied, and processes share their pages."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dragoman.errors import UserError
from dragoman.io import HEADER_KEY, digest_bytes
from dragoman.smt.compiled import Array

DTYPES = {
    "F16": np.float16, "F32": np.float32, "F64": np.float64, "U8": np.uint8, "U16": np.uint16, "I32": np.int32,
    "I64": np.int64,
}  # fmt: skip
LENGTH_BYTES = 8  # the file starts with the length of its header


def save_tensors_with_digest(path: Path, arrays: Mapping[str, Array], about: Mapping[str, str]) -> None:
    """Write arrays into a safetensors file, with `about` and a digest of the arrays in its header."""
    metadata = json.dumps({**about, "digest": digest_arrays(arrays)}, sort_keys=True)
    save_file(dict(arrays), path, {HEADER_KEY: metadata})


def digest_arrays(arrays: Mapping[str, Array]) -> str:
    parts: list[bytes | memoryview] = []
    for name, array in sorted(arrays.items()):
        parts += [
            f"{name}{array.dtype}{array.shape}".encode(),
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).data,
        ]
    return digest_bytes(*parts)


def map_tensors(path: Path) -> dict[str, Array]:
    """Return the arrays of a safetensors file without copying them; a file that does not fit its digest is refused.

    To check the digest, the full file is read once. The pages are mapped copy-on-write, not read-only: Numba would
    compile every function again for read-only arrays.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data_start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        header = json.loads(data[LENGTH_BYTES:data_start].decode())
        about = json.loads(header.pop("__metadata__")[HEADER_KEY])
        arrays, used = {}, 0
        for name, entry in header.items():
            dtype, shape, (begin, end) = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"]), entry["data_offsets"]
            count = int(np.prod(shape))
            if begin < 0 or count * dtype.itemsize != end - begin or (data_start + begin) % dtype.itemsize:
                raise ValueError(f"the bytes of {name!r} do not fit its shape")
            arrays[name] = np.frombuffer(data, dtype, count, data_start + begin).reshape(shape)
            used = max(used, end)
        if data_start + used != len(data):
            raise ValueError(f"it has {len(data):,} bytes, but its header says {data_start + used:,}")
        if digest_arrays(arrays) != about["digest"]:
            raise ValueError("its contents do not match its digest")
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{str(path)!r} is damaged ({error}); copy it again or restore it") from error
    return arrays
