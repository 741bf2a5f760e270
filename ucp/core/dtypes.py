"""Element types by their torch names, with the codes other formats use for them.

>>> DType("bfloat16").itemsize
2
>>> DType.from_safetensors("BF16")
<DType.BFLOAT16: 'bfloat16'>
"""

from __future__ import annotations

import re
from enum import StrEnum


class DType(StrEnum):
    """Element type; the value is the name of the torch dtype."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        """Whether this is a real floating-point type (casts are allowed among these)."""
        return self.value.startswith(("float", "bfloat"))

    @property
    def safetensors(self) -> str:
        """Code of this type in a safetensors header (safetensors 0.4-0.8)."""
        return _SAFETENSORS[self]

    @classmethod
    def named(cls, name: str) -> DType | None:
        """Type of that name, in full, short or as torch prints it; None for a name of none.

        >>> DType.named("bf16"), DType.named("torch.float32"), DType.named("float")
        (<DType.BFLOAT16: 'bfloat16'>, <DType.FLOAT32: 'float32'>, None)
        """
        plain = name.removeprefix("torch.")
        full = _SHORT.get(plain, plain)
        return cls(full) if full in set(cls) else None

    @classmethod
    def from_safetensors(cls, code: str) -> DType:
        """Type for a safetensors code. Raises KeyError for an unknown code."""
        return _FROM_SAFETENSORS[code]


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

_ITEMSIZE = {dtype: 1 if dtype is DType.BOOL else int(re.findall(r"\d+", dtype)[0]) // 8 for dtype in DType}
"""Every name but that of bool has the bits of an element as its first number."""

_SAFETENSORS = {
    DType.FLOAT64: "F64",
    DType.FLOAT32: "F32",
    DType.FLOAT16: "F16",
    DType.BFLOAT16: "BF16",
    DType.FLOAT8_E4M3FN: "F8_E4M3",
    DType.FLOAT8_E4M3FNUZ: "F8_E4M3FNUZ",
    DType.FLOAT8_E5M2: "F8_E5M2",
    DType.FLOAT8_E5M2FNUZ: "F8_E5M2FNUZ",
    DType.INT64: "I64",
    DType.INT32: "I32",
    DType.INT16: "I16",
    DType.INT8: "I8",
    DType.UINT64: "U64",
    DType.UINT32: "U32",
    DType.UINT16: "U16",
    DType.UINT8: "U8",
    DType.BOOL: "BOOL",
    DType.COMPLEX64: "C64",
    DType.COMPLEX128: "C128",
}
_FROM_SAFETENSORS = {code: dtype for dtype, code in _SAFETENSORS.items()}
