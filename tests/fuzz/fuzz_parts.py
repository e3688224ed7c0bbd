"""Parts of the blocks of random models: each takes hidden states and returns what a block adds to them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

WIDTH, HEADS, TOKENS, EXPERTS = 16, 4, 8, 4
ROWS, COLUMNS = 4, 2
"""The sides of an image whose pixels are as many as the tokens."""


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block adds."""
        result: torch.Tensor = self.down(F.gelu(self.up(hidden)))
        return result


class GatedMlp(nn.Module):
    """A gate and its values, from layers of their own or from a fused one."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = nn.Linear(WIDTH, 4 * WIDTH, bias=False) if fused else None
        self.gate = None if fused else nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = None if fused else nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block adds."""
        if self.fused is not None:
            gate, up = self.fused(hidden).chunk(2, dim=-1)
        else:
            assert self.gate is not None
            assert self.up is not None
            gate, up = self.gate(hidden), self.up(hidden)
        result: torch.Tensor = self.down(F.silu(gate) * up)
        return result


class Attention(nn.Module):
    """Causal attention, with projections fused or apart, by torch's function or written out."""

    def __init__(self, *, fused: bool, written_out: bool = False, num_groups: int = HEADS) -> None:
        super().__init__()
        self.written_out, self.num_groups = written_out, num_groups
        kept = WIDTH * num_groups // HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH) if fused else None
        self.query = None if fused else nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = None if fused else nn.Linear(WIDTH, kept, bias=False)
        self.value = None if fused else nn.Linear(WIDTH, kept, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return what a block adds; `mask` says which tokens of each sequence may be looked at."""
        batch, tokens, width = hidden.shape
        size = width // HEADS
        if self.qkv is not None:
            query, key, value = self.qkv(hidden).view(batch, tokens, 3, HEADS, size).permute(2, 0, 3, 1, 4)
        else:
            assert self.query is not None
            assert self.key is not None
            assert self.value is not None
            query = self.query(hidden).view(batch, tokens, HEADS, size).transpose(1, 2)
            key = self.key(hidden).view(batch, tokens, self.num_groups, size).transpose(1, 2)
            value = self.value(hidden).view(batch, tokens, self.num_groups, size).transpose(1, 2)
            if self.num_groups < HEADS:
                key, value = (one.repeat_interleave(HEADS // self.num_groups, dim=1) for one in (key, value))
        attended = self._attend(query, key, value, mask)
        result: torch.Tensor = self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return result

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        tokens = query.shape[-2]
        if not self.written_out and mask is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
        if mask is not None:
            own = torch.eye(tokens, dtype=torch.bool, device=query.device)
            allowed = allowed & mask.bool()[:, None, None, :] | own
        if not self.written_out:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        scores = (query @ key.transpose(-2, -1)) * key.shape[-1] ** -0.5
        weights: torch.Tensor = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
        return weights @ value


class RunningMean(nn.Module):
    """A mean over the tokens so far, with a weight for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.decay = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block adds."""
        counts = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
        result: torch.Tensor = self.mix(hidden.cumsum(dim=1) / counts) * self.decay
        return result


class Recurrence(nn.Module):
    """A state that a loop over the tokens carries on."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.carry = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block adds."""
        entered, state, states = self.enter(hidden), torch.zeros_like(hidden[:, 0]), []
        for token in range(hidden.shape[1]):
            state = torch.tanh(entered[:, token] + self.carry(state))
            states.append(state)
        return torch.stack(states, dim=1)


class TokenConvolution(nn.Module):
    """A causal convolution along the tokens, one filter for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.mix = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block adds."""
        filtered = self.filters(hidden.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2)
        result: torch.Tensor = self.mix(F.silu(filtered))
        return result


class SoftExperts(nn.Module):
    """Experts with stacked weights, all of which every token goes through; a router weighs them."""

    def __init__(self, *, detached: bool = False) -> None:
        super().__init__()
        self.router, self.detached = nn.Linear(WIDTH, EXPERTS), detached
        self.experts_up = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH) * 0.2)
        self.experts_down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24) * 0.2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block adds."""
        shares = self.router(hidden.detach() if self.detached else hidden).softmax(dim=-1)
        inner = F.gelu(torch.einsum("bth,efh->ebtf", hidden, self.experts_up))
        return torch.einsum("ebtf,ehf,bte->bth", inner, self.experts_down, shares)


class RoutedExperts(nn.Module):
    """Experts of which the router's best one is run for a token, by indexing their stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block adds."""
        shares = self.router(hidden).softmax(dim=-1)
        best, chosen = shares.max(dim=-1)
        result: torch.Tensor = torch.einsum("bth,bthf->btf", hidden, self.experts[chosen]) * best[..., None]
        return result


class LoopedExperts(nn.Module):
    """Experts in a list, each run on the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block adds."""
        best, chosen = self.router(hidden).softmax(dim=-1).max(dim=-1)
        total = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            total = total + torch.where((chosen == index)[..., None], expert(hidden) * best[..., None], 0.0)
        return total


class Convolution(nn.Module):
    """A convolution over an image, of all channels or of groups of them."""

    def __init__(self, *, groups: int = 1) -> None:
        super().__init__()
        self.filters = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=groups)
        self.mix = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block adds."""
        result: torch.Tensor = self.mix(F.gelu(self.filters(hidden)))
        return result


class ChannelsLast(nn.Module):
    """A norm and an MLP over the channels of an image, which are moved to the end and back (ConvNeXt)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block adds."""
        result: torch.Tensor = self.mlp(self.norm(hidden.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return result


class ChannelNorm(nn.Module):
    """A norm of sequences that has its channels second: torch's GroupNorm or BatchNorm1d."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normed hidden states."""
        result: torch.Tensor = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return result


SEQUENCE_PARTS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "gated": lambda: GatedMlp(fused=False),
    "gated fused": lambda: GatedMlp(fused=True),
    "attention": lambda: Attention(fused=True),
    "attention apart": lambda: Attention(fused=False),
    "attention grouped": lambda: Attention(fused=False, num_groups=2),
    "attention written out": lambda: Attention(fused=False, written_out=True),
    "running mean": RunningMean,
    "recurrence": Recurrence,
    "token convolution": TokenConvolution,
    "soft experts": SoftExperts,
    "detached router": lambda: SoftExperts(detached=True),
    "routed experts": RoutedExperts,
    "looped experts": LoopedExperts,
}
IMAGE_PARTS: dict[str, Callable[[], nn.Module]] = {
    "convolution": Convolution,
    "grouped convolution": lambda: Convolution(groups=WIDTH),
    "channels last": ChannelsLast,
}
SEQUENCE_NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(WIDTH),
    "rms": lambda: nn.RMSNorm(WIDTH, eps=1e-5),
    "none": nn.Identity,
    "group": lambda: ChannelNorm(nn.GroupNorm(4, WIDTH)),
    "batch": lambda: ChannelNorm(nn.BatchNorm1d(WIDTH)),
}
IMAGE_NORMS: dict[str, Callable[[], nn.Module]] = {
    "group": lambda: nn.GroupNorm(4, WIDTH),
    "batch": lambda: nn.BatchNorm2d(WIDTH),
    "none": nn.Identity,
}
