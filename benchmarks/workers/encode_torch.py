"""The same encoding, written with torch operations as its users would."""

import hashlib

import torch
from encode_numbers import VALUES, new_residual
from serving import GIVEN, serve

torch.set_num_threads(GIVEN["threads"])
values = torch.from_numpy(VALUES)


def scale_of(largest, headroom):
    """The power of two that puts the largest magnitude below 2^(headroom + 1), and its exponent."""
    _, exponent = torch.frexp(largest)
    exponent = torch.where(largest > 0, exponent - 1 - headroom, 0).clamp(min=-126)
    return torch.ldexp(torch.ones_like(largest), exponent), exponent


def encode_f8(residual):
    wanted = values + residual
    scale, _ = scale_of(wanted.abs().max(), 7)
    codes = (wanted / scale).to(torch.float8_e4m3fn)
    torch.sub(wanted, codes.to(torch.float32) * scale, out=residual)
    return codes.view(torch.uint8), scale


def encode_f4(residual):
    wanted = (values + residual).reshape(-1, 32)
    scale, exponent = scale_of(wanted.abs().amax(dim=1, keepdim=True), 2)
    scaled = (wanted.abs() / scale).clamp(max=6.0)
    step = torch.where(scaled < 2, 0.5, torch.where(scaled < 4, 1.0, 2.0))
    rounded = torch.round(scaled / step) * step
    magnitude = torch.where(rounded < 2, rounded * 2, torch.where(rounded < 4, rounded + 2, rounded / 2 + 4))
    codes = magnitude.to(torch.uint8) | (wanted < 0).to(torch.uint8) << 3
    decoded = torch.where(wanted < 0, -rounded, rounded) * scale
    torch.sub(wanted, decoded, out=residual.view_as(wanted))
    pairs = codes.reshape(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4, (exponent + 127).to(torch.uint8)


encode = encode_f4 if GIVEN["delta"] == "F4" else encode_f8
residual = torch.from_numpy(new_residual())


def digest():
    """A hash of the scales and the residual of a first encode: what the codes say but the sign of a zero."""
    mine = torch.from_numpy(new_residual())
    _, scales = encode(mine)
    return hashlib.sha256(scales.numpy().tobytes() + mine.numpy().tobytes()).hexdigest()


serve(lambda: encode(residual), digest=digest)
