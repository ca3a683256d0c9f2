"""Three small Vision Transformers of the same digits: plain, the same with a penalty, and 1-Lipschitz."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import howsmooth as hs

CLASSES = 10
SIDE = 8

# Of the plain form.
PLAIN_PATCH = 2
PLAIN_DIM = 40
PLAIN_HEADS = 4
PLAIN_BLOCKS = 2

# Of the 1-Lipschitz form.
LIPSCHITZ_ATTENTION = "softmax"
LIPSCHITZ_PATCH = 2
LIPSCHITZ_DIM = 16
LIPSCHITZ_BLOCKS = 2
LIPSCHITZ_HEAD = 128
LIPSCHITZ_RADIUS = 2.5
LIPSCHITZ_WEIGHT = 0.1


class Block(nn.Module):
    """A block as it usually is: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm_2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, n, dim)."""
        u = self.norm_1(x)
        x = x + self.attention(u, u, u, need_weights=False)[0]
        return x + self.mlp(self.norm_2(x))


class PlainViT(nn.Module):
    """An ordinary pre-norm Vision Transformer with learned positions; the mean token is classified."""

    def __init__(
        self,
        patch: int = PLAIN_PATCH,
        dim: int = PLAIN_DIM,
        heads: int = PLAIN_HEADS,
        blocks: int = PLAIN_BLOCKS,
    ) -> None:
        super().__init__()
        self.patches = hs.nn.Patches(patch)
        self.embed = nn.Linear(patch * patch, dim)
        self.positions = nn.Parameter(0.02 * torch.randn((SIDE // patch) ** 2, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10) of images (batch, 1, 8, 8)."""
        x = self.blocks(self.embed(self.patches(images)) + self.positions)
        return self.head(self.norm(x).mean(dim=1))


def certifiable(model: PlainViT, length: int) -> nn.Sequential:
    """Return ``model``, the same function of ``length`` patches, made of modules that certify knows."""
    parts: list[nn.Module] = [model.patches, model.embed]
    positions = hs.nn.AddPositions(length, model.positions.shape[1])
    positions.positions = model.positions
    parts.append(positions)
    for block in model.blocks:
        # Tokens come from a norm layer: the radius of the attention is that of its outputs.
        attention = hs.nn.SoftmaxAttention.from_torch(block.attention, length=length)
        parts.append(hs.nn.Residual(nn.Sequential(block.norm_1, hs.nn.SelfAttentionBlock(attention))))
        parts.append(hs.nn.Residual(nn.Sequential(block.norm_2, *block.mlp)))
    head = nn.Linear(model.head.in_features, CLASSES).to(model.head.weight)
    with torch.no_grad():  # MeanPool gives √n times the mean
        head.weight.copy_(model.head.weight / length**0.5)
        head.bias.copy_(model.head.bias)
    return nn.Sequential(*parts, model.norm, hs.nn.MeanPool(), head)


ATTENTIONS = {
    "softmax": "SoftmaxAttention",
    "sinkhorn": "SinkhornAttention",
    "cosine": "CosineAttention",
    "l2": "L2Attention",
    "sigmoid": "SigmoidAttention",
}


def lipschitz_vit(
    attention: str | None = LIPSCHITZ_ATTENTION,
    *,
    patch: int = LIPSCHITZ_PATCH,
    dim: int = LIPSCHITZ_DIM,
    blocks: int = LIPSCHITZ_BLOCKS,
    head: int = LIPSCHITZ_HEAD,
    radius: float = LIPSCHITZ_RADIUS,
    weight: float = LIPSCHITZ_WEIGHT,
    learnable: bool = True,
) -> nn.Sequential:
    """Return a Vision Transformer with Lipschitz constant at most 1 for all inputs, images or not.

    Parameters
    ----------
    attention
        A kind of attention of ``ATTENTIONS``, or None for a model without.
    patch
        Side of a patch.
    dim
        Dimension of a token.
    blocks
        Blocks: the average of the tokens and their attention, then an orthogonal MLP.
    head
        Width of the orthogonal MLP that classifies all tokens together.
    radius
        Of the ball in which attention has constant 1; longer tokens are projected on it.
    weight
        Of attention in the average at the start.
    learnable
        Whether that weight is learned.

    """
    nns = hs.nn
    count = (SIDE // patch) ** 2
    # Pixels in [0, 1] make patches of norm at most `patch`: on images, clipping does nothing.
    parts: list[nn.Module] = [nns.Patches(patch), nns.ClipTokens(float(patch))]
    parts += [nns.OrthogonalLinear(patch * patch, dim), nns.AddPositions(count, dim)]
    for _ in range(blocks):
        if attention is not None:
            parts.append(attended(attention, dim, count, radius, weight, learnable=learnable))
        parts += [_square(dim), nns.MaxMin(), _square(dim)]
    parts += [nn.Flatten(), nns.OrthogonalLinear(count * dim, head)]
    return nn.Sequential(
        *parts, nns.MaxMin(), _square(head), nns.MaxMin(), nns.OrthogonalLinear(head, CLASSES)
    )


def settled(model: nn.Sequential) -> nn.Sequential:
    """Return the model with its orthogonal layers as ordinary ones: smaller, and certified by their norms."""

    def plain(module: nn.Module) -> nn.Module:
        if not isinstance(module, hs.nn.OrthogonalLinear):
            return module
        linear = nn.Linear(module.in_features, module.out_features)
        linear.weight = nn.Parameter(module.weight.detach().clone())
        linear.bias = module.bias
        return linear

    return nn.Sequential(*map(plain, model)).train(model.training)


def _square(dim: int) -> nn.Module:
    return hs.nn.OrthogonalLinear(dim, dim, orthogonal_map="cayley")


def attended(
    kind: str, dim: int, length: int, radius: float, weight: float, *, learnable: bool = True, **mask: object
) -> nn.Module:
    """Return a kind of attention in a residual of constant 1."""
    # One head: the bound of several grows with their number, and nothing learned here needs them.
    made = getattr(hs.nn, ATTENTIONS[kind])
    layer = made(dim, 1, length=length, radius=radius, constant=1.0, beyond="clip", **mask)
    if kind in ("softmax", "sinkhorn", "sigmoid"):
        # Large scores make a large divisor, and then no training finds back: begin with small ones. Values
        # are orthogonal, since only what is as long as the longest of them comes through a division whole.
        with torch.no_grad():
            queries, keys, values = layer.in_proj_weight.chunk(3)
            queries.mul_(0.1)
            keys.mul_(0.1)
            nn.init.orthogonal_(values)
            nn.init.orthogonal_(layer.out_proj.weight)
    return hs.nn.AverageResidual(hs.nn.SelfAttentionBlock(layer), weight, learnable=learnable)


class Zero(nn.Module):
    """A branch of a residual that returns zeros."""

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros like x."""
        return torch.zeros_like(x)


def without_attention(model: nn.Sequential) -> nn.Sequential:
    """Return a copy in which each attention returns zero, and the rest is as it was."""
    found = copy.deepcopy(model)
    for part in found:
        if isinstance(part, hs.nn.AverageResidual):
            part.inner = Zero()
    return found
