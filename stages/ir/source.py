"""Puts strings into generated code: as literals, as checked names, as words of known lists.

Names of parameters, devices and methods come from models and files, and may be anything. Everything that codegen writes
passes through a function of this module, and `runtime.whitelist` looks at the result before it runs.
"""

from __future__ import annotations

import keyword
import math
import re
from typing import Any

from stowage.stages.ir.errors import TableError

_PLAIN = re.compile(r"[ !#-&(-\[\]-~]*")
"""Printable ASCII without quotes and backslashes."""
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OPERATOR = re.compile(r"[A-Za-z_]\w*\.\w+\.\w+", re.ASCII)
_DEVICE = re.compile(r"(cpu|cuda|meta|mps|xpu|hpu)(:\d{1,4})?")
RESERVED = frozenset({"run", "aten", "torch", "step", "norms", "gradients", "float", "complex", "Tensor", "Iteration"})
"""Names that generated code uses itself."""

# fmt: off
DTYPES = frozenset({
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
    "uint64", "bool", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "quint8", "qint8", "qint32", "quint4x2", "quint2x4",
    "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "int1", "int2", "int3", "int4", "int5", "int6", "int7",
    "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
})
# fmt: on
LAYOUTS = frozenset({"strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"}) | {
    "_mkldnn"
}
MEMORY_FORMATS = frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"})
WORDS = {"dtype": DTYPES, "layout": LAYOUTS, "memory_format": MEMORY_FORMATS}
"""Attributes of `torch` that arguments may be, by kind."""
ROLES = frozenset({"parameter", "buffer", "input", "constant", "outside", "gradient"})


def quoted(text: str) -> str:
    """Return a string literal of `text`."""
    return f'"{text}"' if _PLAIN.fullmatch(text) else ascii(text)


def identifier(name: str) -> str:
    """Return `name` if generated code may give it to a value.

    Raises:
        TableError: generated code may not use it.
    """
    if not can_be_value(name):
        raise _refused("the name of a value", name)
    return name


def can_be_value(name: str) -> bool:
    """Say whether generated code may give a value that name."""
    return (
        _WORD.fullmatch(name) is not None
        and not keyword.iskeyword(name)
        and name not in RESERVED
        and not name.startswith("__")
    )


def operator_name(target: str) -> str:
    """Return an operator's name if it has the form `aten.addmm.default`.

    Raises:
        TableError: it has another form.
    """
    if not _OPERATOR.fullmatch(target):
        raise _refused("an operator", target)
    return target


def word(kind: str, content: Any) -> str:
    """Return the name of an attribute of `torch`: a dtype, layout or memory format.

    Raises:
        TableError: there is none of that name.
    """
    if not isinstance(content, str) or content not in WORDS.get(kind, ()):
        raise _refused(f"a {kind}", content)
    return content


def role_of(source: str) -> tuple[str, str]:
    """Split the source of a persistent value, `parameter:h.0.weight`, into role and name.

    Raises:
        TableError: there is no such role.
    """
    role, _, name = source.partition(":")
    if role not in ROLES:
        raise _refused("where a value comes from", source)
    return role, name


def device_name(content: Any) -> str:
    """Return the name of a device if it has the form `cuda:0`.

    Raises:
        TableError: it has another form.
    """
    if not isinstance(content, str) or not _DEVICE.fullmatch(content):
        raise _refused("a device", content)
    return content


def number(content: Any) -> float:
    """Return the number that a text such as `-inf` means.

    Raises:
        TableError: it is no number.
    """
    try:
        if isinstance(content, str | int | float) and not isinstance(content, bool):
            return float(content)
    except (ValueError, OverflowError):
        pass
    raise _refused("a number", content)


def number_text(content: Any) -> str:
    """Return any number as source, infinities and NaN too."""
    value = number(content)
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def remark(text: str) -> str:
    """Clean `text` for a comment or a docstring: one line, without quotes and backslashes."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() and c not in "\\\"'" else "?" for c in line)


def file_name(text: str, what: str) -> str:
    """Return `text` if it can be part of a file's name and of no other path.

    Raises:
        TableError: it cannot.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,120}", text, re.ASCII):
        raise _refused(f"the name of {what}", text)
    return text


def _refused(what: str, content: Any) -> TableError:
    text = ascii(content)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return TableError(f"{shown} is not {what}: the tables of this plan were changed, so make them again (`dvc repro`).")
