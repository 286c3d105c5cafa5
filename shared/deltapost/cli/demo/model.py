"""The demo's model: a byte-level transformer of about 0.93 million parameters, equal for equal seeds.

Pre-norm blocks as in GPT-2 (Radford et al., 2019) without biases. Each position starts from its byte and the
two before it, as in the n-gram embeddings of the Byte Latent Transformer (Pagnoni et al., 2024): the blocks
need not learn to look there first, and a minute on two cores is enough to get far below the unigram loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ByteTransformer", "ModelSize", "build_model", "build_optimizer", "held_out_loss", "training_loss"]

#: A byte has 256 values; the vocabulary is exactly these.
VOCABULARY: Final = 256

#: Bytes that a position is embedded from: its own and those just before it, each with a table of its own.
RECENT_BYTES: Final = 3

#: Standard deviation of new embeddings: small, so that what is learned outweighs it within a few steps.
EMBEDDING_SCALE: Final = 0.05

#: How much faster tables (a row is in few batches) and head (it starts at zero) learn than the blocks.
TABLE_RATE: Final = 15.0


@dataclass(frozen=True)
class ModelSize:
    """`width` must be a multiple of `heads`; `context` is the longest input in bytes."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64


class Block(nn.Module):
    """Causal self-attention and a feed-forward part of four times the width, each with its residual."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width, bias=False)
        self.attention_in = nn.Linear(size.width, 3 * size.width, bias=False)
        self.attention_out = nn.Linear(size.width, size.width, bias=False)
        self.feed_norm = nn.LayerNorm(size.width, bias=False)
        self.feed_in = nn.Linear(size.width, 4 * size.width, bias=False)
        self.feed_out = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention_in(self.attention_norm(x))
        query, key, value = parts.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed_out(functional.relu(self.feed_in(self.feed_norm(x))))
        return x + fed


class ByteTransformer(nn.Module):
    """Predicts each next byte: (batch, length) bytes in, (batch, length, 256) logits out."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.byte_embedding = nn.Embedding(RECENT_BYTES * VOCABULARY, size.width)
        self.position_embedding = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        # A window begins as if after NUL bytes.
        padded = functional.pad(inputs, (RECENT_BYTES - 1, 0))
        x = self.position_embedding.weight[:length]
        for age in range(RECENT_BYTES):
            rows = padded[:, RECENT_BYTES - 1 - age :][:, :length] + age * VOCABULARY
            x = x + self.byte_embedding(rows)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model(seed: int, size: ModelSize | None = None) -> ByteTransformer:
    """A new model on the CPU. Equal seeds give equal weights; torch's global generator is left as it was."""
    chosen = size or ModelSize()
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = ByteTransformer(chosen)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
            elif name == "head.weight" or name.endswith("_out.weight"):
                # A model that starts at the uniform distribution, with blocks that start as identities.
                parameter.zero_()
            elif "embedding" in name:
                parameter.normal_(0.0, EMBEDDING_SCALE, generator=generator)
            else:
                parameter.normal_(0.0, 1 / math.sqrt(chosen.width), generator=generator)
    return model


def build_optimizer(model: ByteTransformer, learning_rate: float) -> torch.optim.AdamW:
    """AdamW with the short second moment that short runs want; tables and head at TABLE_RATE × the rate."""
    named = list(model.named_parameters())
    fast = [parameter for name, parameter in named if "embedding" in name or name == "head.weight"]
    blocks = [parameter for name, parameter in named if name.startswith("blocks.") and parameter.ndim >= 2]
    norms = [parameter for _, parameter in named if parameter.ndim < 2]
    groups = [
        {"params": fast, "lr": TABLE_RATE * learning_rate, "weight_decay": 0.0},
        {"params": blocks, "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def training_loss(model: nn.Module, windows: NDArray[np.int64]) -> Tensor:
    """Mean nats per byte over windows of shape (batch, context + 1), differentiable."""
    batch = torch.from_numpy(windows)
    logits: Tensor = model(batch[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))


def held_out_loss(model: nn.Module, batches: Iterable[NDArray[np.int64]]) -> float:
    """Mean nats per byte over all windows of `batches`, without gradients."""
    nats: list[float] = []
    count = 0
    with torch.no_grad():
        for windows in batches:
            nats.append(float(training_loss(model, windows)) * len(windows))
            count += len(windows)
    return math.fsum(nats) / count
