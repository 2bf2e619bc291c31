"""A Llama 3 decoder in plain PyTorch: the reference model of demos, tests and benchmarks.

It decides nothing about parallelism: it is the `nn.Module` a user would bring. Module names are
those of torchtitan's Llama 3 (`layers.0.attention.wq`, `layers.0.feed_forward.w1`, ...), so that
wrap patterns written for one work on the other. Rotary embeddings are real-valued, because
Inductor does not generate code for complex numbers on CPUs.

Sizes: The Llama 3 Herd of Models, arXiv 2407.21783, table 3 (8B, 70B, 405B); the feed-forward
width follows from the released `params.json` (`ffn_dim_multiplier`, `multiple_of`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Llama3Config:
    """Dimensions of one Llama 3 model.

    `ffn_dim` is the width of the SwiGLU feed-forward layer, `max_seq` the longest sequence the
    rotary table covers.
    """

    dim: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    vocab_size: int = 512
    ffn_dim: int = 768
    max_seq: int = 512
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(
                f"dim must be a multiple of num_heads, got dim={self.dim} and "
                f"num_heads={self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got num_heads={self.num_heads} "
                f"and num_kv_heads={self.num_kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads

    @classmethod
    def named(cls, size: str, **overrides: int | float) -> Llama3Config:
        """The config called `size` (see `LLAMA3_SIZES`), with some fields replaced.

        Raises:
            ValueError: No such size.
        """
        if size not in LLAMA3_SIZES:
            raise ValueError(f"unknown Llama 3 size {size!r}: choose one of {sorted(LLAMA3_SIZES)}")
        return replace(LLAMA3_SIZES[size], **overrides)  # pyright: ignore[reportArgumentType]


_RELEASED = Llama3Config(vocab_size=128_256, num_kv_heads=8, num_heads=32, max_seq=8192)

LLAMA3_SIZES: dict[str, Llama3Config] = {
    "debug": Llama3Config(),
    "8B": replace(_RELEASED, dim=4096, num_layers=32, num_heads=32, ffn_dim=14_336),
    "70B": replace(_RELEASED, dim=8192, num_layers=80, num_heads=64, ffn_dim=28_672),
    "405B": replace(_RELEASED, dim=16_384, num_layers=126, num_heads=128, ffn_dim=53_248),
}


def rotary_table(head_dim: int, max_seq: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each of shape `[max_seq, head_dim / 2]`, float32.

    Angle of position p and pair i: `p * theta ** (-2 i / head_dim)` (RoFormer, arXiv 2104.09864).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(max_seq, dtype=torch.float32), theta**-exponents)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` of shape `[batch, seq, heads, head_dim]`, each adjacent pair turned by its angle."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(x)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.is_grouped = config.num_kv_heads != config.num_heads
        kv_dim = config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attends over `x` of shape `[batch, seq, dim]`; the result has the same shape."""
        # Head counts come from the projections' widths, not the config: under tensor parallelism
        # each rank holds some of the heads.
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.wq, self.wk, self.wv)
        )
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.is_grouped,
        )
        return self.wo(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer: `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[batch, seq, dim]` to the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """One decoder block: pre-norm attention and pre-norm feed-forward, each with a residual."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps `[batch, seq, dim]` to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama3(nn.Module):
    """Token ids of shape `[batch, seq]` to logits of shape `[batch, seq, vocab_size]`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        cos, sin = rotary_table(config.head_dim, config.max_seq, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def init_weights(self) -> None:
        """Fills every parameter and buffer in place; call it after `to_empty` of a meta model.

        Matrices are normal with deviation 0.02, the two that write into the residual stream
        smaller by `sqrt(2 * num_layers)` (GPT-2, Radford et al. 2019, section 2.3).
        """
        residual_std = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if "norm" in name:
                nn.init.ones_(parameter)
                continue
            is_residual = name.endswith(("wo.weight", "w2.weight"))
            nn.init.normal_(parameter, std=residual_std if is_residual else 0.02)
        cos, sin = rotary_table(self.config.head_dim, self.config.max_seq, self.config.rope_theta)
        with torch.no_grad():
            self.cos.copy_(cos)
            self.sin.copy_(sin)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position.

        Raises:
            ValueError: The sequence is longer than the rotary table.
        """
        seq = tokens.shape[1]
        if seq > self.config.max_seq:
            raise ValueError(
                f"tokens has {seq} positions, this model covers {self.config.max_seq}: raise "
                "max_seq in its Llama3Config"
            )
        cos, sin = self.cos[:seq], self.sin[:seq]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))
