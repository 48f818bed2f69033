"""safetensors headers: eight bytes of length, JSON, then data. Read with bounds, never trusted.

Format: https://github.com/huggingface/safetensors#format (read 2026-11-29).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BITS: Mapping[str, int] = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "C64": 64,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
}
"""Bits per element of safetensors' dtype names."""

MAX_HEADER_BYTES = 32 * 1024**2
"""The format allows 100 MB. This holds 250,000 tensors in one file, more than the largest models
have in all their shards (61 layers x 384 experts x 3 projections x 3 tensors), and takes under 200
MB to read."""
_FIRST_READ_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor of a safetensors header."""

    dtype: str
    """safetensors' name, e.g. ``BF16``."""
    shape: tuple[int, ...]
    nbytes: int
    file: str
    """File name inside the checkpoint."""
    offset: int = 0
    """First byte of the data, counted from the start of the file."""


class Corrupt(ValueError):
    """Raised when bytes are not what the format promises; the text completes ``<file>: ...``."""


def parse_json(
    data: bytes, *, what: str = "it", each: Callable[[dict[str, Any]], Any] | None = None
) -> Any:
    """JSON from untrusted bytes; any fault is Corrupt. ``each`` replaces every object as soon as it
    is read.

    >>> parse_json(b'{"a": 1}')
    {'a': 1}
    """
    try:
        return json.loads(data, object_hook=each)
    except RecursionError:
        raise Corrupt(f"{what} is nested too deeply") from None
    except ValueError as e:
        raise Corrupt(f"{what} is not JSON ({e})") from None


def parse_object(
    data: bytes, *, what: str = "it", each: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """A JSON object from untrusted bytes; anything else is Corrupt."""
    value = parse_json(data, what=what, each=each)
    if not isinstance(value, dict):
        raise Corrupt(f"{what} is not a JSON object")
    return value


def read_header(
    read: Callable[[int, int], bytes], file_size: int, file: str
) -> dict[str, TensorFacts]:
    """Tensors of one file. ``read(start, length)`` returns bytes of it.

    Checks: header inside the file and under the limit, known dtypes, offsets inside the data, shape
    x dtype = bytes, and no two tensors share bytes.
    """
    if file_size < 8:
        raise Corrupt(f"{file_size} bytes is too short for a safetensors file")
    start = read(0, _FIRST_READ_BYTES)  # most headers fit: one request each on the Hub
    length = int.from_bytes(start[:8], "little")
    if length > file_size - 8:
        raise Corrupt(
            f"the header claims {length} bytes and the file has "
            f"{file_size}; it is truncated or corrupt"
        )
    if length > MAX_HEADER_BYTES:
        raise Corrupt(
            f"the header claims {length} bytes; more than {MAX_HEADER_BYTES} are not read"
        )
    if 8 + length <= len(start):
        body = start[8 : 8 + length]
    else:
        body = read(8, length)
    tensors = parse_object(body, what="the header", each=_packer())
    tensors.pop("__metadata__", None)
    for name, entry in tensors.items():
        tensors[name] = _entry(name, entry, 8 + length, file_size, file)
    _no_overlap(tensors)
    return tensors


def _packer() -> Callable[[dict[str, Any]], Any]:
    """Makes each tensor's object a tuple of dtype, shape and offsets, with one copy of what many
    tensors share: half of the memory that dictionaries would take."""
    shared: dict[Any, Any] = {}

    def pack(entry: dict[str, Any]) -> Any:
        if not entry.keys() >= {"dtype", "shape", "data_offsets"}:
            return entry
        shape = _natural_numbers(entry["shape"])
        if isinstance(entry["dtype"], str):
            dtype = entry["dtype"]
        else:
            dtype = None
        return (
            shared.setdefault(dtype, dtype),
            shared.setdefault(shape, shape),
            _natural_numbers(entry["data_offsets"]),
        )

    return pack


def _entry(name: str, entry: object, data_start: int, file_size: int, file: str) -> TensorFacts:
    if not isinstance(entry, tuple):
        raise Corrupt(
            f"the header's entry of {name!r} is not an object of dtype, shape and data_offsets"
        )
    dtype, shape, offsets = entry
    if dtype not in DTYPE_BITS:
        raise Corrupt(f"tensor {name!r} has unknown dtype {dtype!r}")
    if shape is None:
        raise Corrupt(f"tensor {name!r} has no valid shape")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Corrupt(f"tensor {name!r} has no valid data offsets")
    begin, end = offsets
    if data_start + end > file_size:
        missing = data_start + end - file_size
        raise Corrupt(
            f"tensor {name!r} ends {missing} bytes behind the end of the file; it is truncated"
        )
    elements = 1
    for n in shape:
        elements *= n
        if elements > 1 << 62:
            raise Corrupt(f"tensor {name!r} has an absurd shape")
    if (elements * DTYPE_BITS[dtype] + 7) // 8 != end - begin:
        raise Corrupt(
            f"tensor {name!r}: shape {list(shape)} of {dtype} does not fill its {end - begin} bytes"
        )
    return TensorFacts(dtype, shape, end - begin, file, data_start + begin)


def _natural_numbers(value: object) -> tuple[int, ...] | None:
    if (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    ):
        return tuple(value)
    return None


def _no_overlap(tensors: Mapping[str, TensorFacts]) -> None:
    end, last = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.nbytes and tensor.offset < end:
            raise Corrupt(f"tensors {last!r} and {name!r} share bytes")
        end, last = max(end, tensor.offset + tensor.nbytes), name
