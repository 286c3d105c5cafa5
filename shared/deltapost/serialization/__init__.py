"""Bytes: tensors, schemas and payloads that read and write the same everywhere."""

from __future__ import annotations

from deltapost.serialization.digest import digest
from deltapost.serialization.payload import pack, packed, unpack, unpack_expected
from deltapost.serialization.schema import ParameterSpec, Schema
from deltapost.serialization.tensor import DType, TensorBytes, element_bytes

__all__ = [
    "DType",
    "ParameterSpec",
    "Schema",
    "TensorBytes",
    "digest",
    "element_bytes",
    "pack",
    "packed",
    "unpack",
    "unpack_expected",
]
