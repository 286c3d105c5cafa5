"""Encodes values plus residual with deltapost's C kernels; what the codes leave out is the next residual."""

import hashlib

from encode_numbers import VALUES, new_residual
from serving import GIVEN, serve

from deltapost.adapters import kernels, native_codes

found = kernels.load()
if found is None:
    raise SystemExit("deltapost was installed without its C kernels: see `deltapost doctor`")
residual = new_residual()


def encode():
    return native_codes.quantize(found, GIVEN["threads"], VALUES, GIVEN["delta"], residual)


def digest():
    """A hash of the scales and the residual of a first encode: what the codes say but the sign of a zero."""
    mine = new_residual()
    _, scales = native_codes.quantize(found, GIVEN["threads"], VALUES, GIVEN["delta"], mine)
    return hashlib.sha256(bytes(scales.data) + mine.tobytes()).hexdigest()


serve(encode, digest=digest)
