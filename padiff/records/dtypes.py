"""Names of the dtypes that a run may contain."""

from __future__ import annotations

from sys import intern

#: All dtypes of torch and paddle, without the framework's prefix.
DTYPES = frozenset((
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "qint8", "quint8", "qint32", "quint4x2", "quint2x4",
    "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in
    range(1, 8)),
))  # fmt: skip


def known_dtype(value: object, what: str = "a tensor") -> str:
    """Return the name of a dtype, interned.

    Raises:
        ValueError: no framework has such a dtype.
    """
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"unknown dtype {ascii(value)[:80]} of {ascii(what)[:80]}")
    return intern(value)
