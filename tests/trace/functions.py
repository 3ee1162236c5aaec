"""Functions of PyTorch, and tensors in the memory formats of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

_NAMES = """
    abs acos asinh atan ceil celu clone cos cosh digamma elu erf erfc exp exp2 expm1 floor frac gelu glu
    hardshrink hardsigmoid hardswish hardtanh i0 leaky_relu lgamma log1p logsigmoid logit_ mish neg positive
    reciprocal relu relu6 round rsqrt selu sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt
    square tan tanh tanhshrink threshold_ trunc log_softmax softmax softmin cumsum cumprod logcumsumexp flip
    rot90 roll sort triu tril isnan nan_to_num logical_not dropout alpha_dropout feature_alpha_dropout normalize
    layer_norm group_norm instance_norm batch_norm local_response_norm mean sum amax var std norm prod logsumexp
    argmax max median topk unfold_ channel_shuffle pixel_shuffle pixel_unshuffle avg_pool max_pool adaptive_avg
    adaptive_max lp_pool pad reflect replicate circular upsample bilinear bicubic conv depthwise transposed_conv
    grouped_conv linear matmul bmm einsum attention gather index index_select masked_fill where stack cat chunk
    split repeat expand tile interleave diag contiguous to_double to_bfloat reshape flatten permute squeeze
    unsqueeze narrow select rand_like randn_like bernoulli zeros_like full_like embedding rms_norm cosine cdist
    scale clamp lerp addcmul pow hypot atan2 copysign heaviside ldexp remainder fmod floor_divide maximum xlogy
"""

NAMES = _NAMES.split()


def _other(x: torch.Tensor) -> torch.Tensor:
    """Like `x`, its dimensions in memory the other way round."""
    return x.detach().flip(0).contiguous().transpose(0, -1).contiguous().transpose(0, -1)


def called(name: str, x: torch.Tensor) -> Any:
    """What a function returns for a tensor of three or four dimensions; it may raise where it takes no such tensor."""
    c, w = x.shape[1], x.shape[-1]
    kernel = torch.full((c, c, 3, 3), 0.1, requires_grad=True)
    image = x.dim() == 4
    cases: dict[str, Callable[[], Any]] = {
        "glu": lambda: F.glu(x, 1),
        "softmax": lambda: F.softmax(x, 1),
        "log_softmax": lambda: F.log_softmax(x, 1),
        "softmin": lambda: F.softmin(x, -1),
        "logit_": lambda: torch.logit(x, 1e-3),
        "threshold_": lambda: F.threshold(x, 0.1, 0.0),
        "roll": lambda: torch.roll(x, (1, -1), (1, 2)),
        "rot90": lambda: torch.rot90(x, 1, (1, 2)),
        "flip": lambda: x.flip(1),
        "sort": lambda: x.sort(1)[0],
        "topk": lambda: x.topk(2, 1)[0],
        "median": lambda: x.median(1)[0],
        "layer_norm": lambda: F.layer_norm(x, x.shape[-1:]),
        "rms_norm": lambda: F.rms_norm(x, x.shape[-1:]),
        "group_norm": lambda: F.group_norm(x, 2),
        "instance_norm": lambda: F.instance_norm(x),
        "batch_norm": lambda: F.batch_norm(x, torch.zeros(c), torch.ones(c), training=True),
        "local_response_norm": lambda: F.local_response_norm(x, 2),
        "mean": lambda: (x.mean(1), x.mean((0, 2)), x.mean(1, keepdim=True)),
        "unfold_": lambda: F.unfold(x, 2) if image else x.unfold(1, 2, 1),
        "channel_shuffle": lambda: F.channel_shuffle(x, 2),
        "pixel_shuffle": lambda: F.pixel_shuffle(x, 2) if image else x.sin(),
        "pixel_unshuffle": lambda: F.pixel_unshuffle(x, 2) if image else x.sin(),
        "avg_pool": lambda: F.avg_pool2d(x, 2),
        "max_pool": lambda: F.max_pool2d(x, 2),
        "adaptive_avg": lambda: F.adaptive_avg_pool2d(x, 2),
        "adaptive_max": lambda: F.adaptive_max_pool2d(x, 2),
        "lp_pool": lambda: F.lp_pool2d(x, 2.0, 2),
        "pad": lambda: F.pad(x, (1, 0)),
        "reflect": lambda: F.pad(x, (1, 1, 1, 1), "reflect"),
        "replicate": lambda: F.pad(x, (1, 1, 1, 1), "replicate"),
        "circular": lambda: F.pad(x, (1, 1, 1, 1), "circular") if image else x.cos(),
        "upsample": lambda: F.interpolate(x, scale_factor=2) if image else x.sin(),
        "bilinear": lambda: F.interpolate(x, scale_factor=2, mode="bilinear") if image else x.sin(),
        "bicubic": lambda: F.interpolate(x, scale_factor=2, mode="bicubic") if image else x.sin(),
        "conv": lambda: F.conv2d(x, kernel, padding=1) if image else F.conv1d(x, kernel[..., 0]),
        "depthwise": lambda: F.conv2d(x, kernel[:, :1], padding=1, groups=c) if image else x.sin(),
        "grouped_conv": lambda: F.conv2d(x, kernel[:, : c // 2], padding=1, groups=2) if image else x.sin(),
        "transposed_conv": lambda: F.conv_transpose2d(x, kernel) if image else F.conv_transpose1d(x, kernel[..., 0]),
        "linear": lambda: F.linear(x, torch.ones(3, w, requires_grad=True), torch.ones(3, requires_grad=True)),
        "matmul": lambda: x @ x.transpose(-1, -2),
        "bmm": lambda: torch.bmm(x.flatten(1, -2), x.flatten(1, -2).mT),
        "einsum": lambda: torch.einsum("b...i,b...j->b...ij", x, x),
        "attention": lambda: F.scaled_dot_product_attention(x, x, x, is_causal=True) if image else x.sin(),
        "gather": lambda: x.gather(1, torch.zeros_like(x, dtype=torch.long)),
        "index": lambda: x[:, torch.tensor([1, 0, 1])],
        "index_select": lambda: x.index_select(-1, torch.tensor([1, 0])),
        "masked_fill": lambda: x.masked_fill(x.detach() > 0.7, 0.0),
        "where": lambda: torch.where(x.detach() > 0.7, x, _other(x)),
        "stack": lambda: torch.stack([x, x.sin()], 1),
        "cat": lambda: torch.cat([x, _other(x)], 1),
        "chunk": lambda: [part.exp() for part in x.chunk(2, 1)],
        "split": lambda: [part.exp() for part in x.split(1, -1)],
        "repeat": lambda: x.repeat(2, *[1] * (x.dim() - 1)),
        "expand": lambda: x[:1].expand_as(x) * x,
        "tile": lambda: x.tile(2),
        "interleave": lambda: x.repeat_interleave(2, 1),
        "diag": lambda: x.diagonal(dim1=-2, dim2=-1).exp(),
        "to_double": lambda: x.double(),
        "to_bfloat": lambda: F.gelu(x.bfloat16()),
        "reshape": lambda: x.reshape(x.shape[0], -1),
        "permute": lambda: x.movedim(1, -1).exp(),
        "narrow": lambda: x.narrow(1, 0, 1).exp(),
        "select": lambda: x.select(1, 0).exp(),
        "unsqueeze": lambda: x.unsqueeze(1).exp(),
        "full_like": lambda: x * torch.full_like(x, 2.0),
        "zeros_like": lambda: x + torch.zeros_like(x),
        "rand_like": lambda: x * torch.rand_like(x),
        "randn_like": lambda: x * torch.randn_like(x),
        "bernoulli": lambda: x * torch.bernoulli(x.detach().clamp(0, 1)),
        "embedding": lambda: F.embedding(torch.ones(2, 3, dtype=torch.long), x.flatten(1)),
        "cosine": lambda: F.cosine_similarity(x, _other(x)),
        "cdist": lambda: torch.cdist(x, x * 2),
        "scale": lambda: x.mul(2).add_(1),
        "clamp": lambda: x.clamp(0.6, 0.9),
        "triu": lambda: x.triu(),
        **{n: (lambda n=n: getattr(torch, n)(x, 1)) for n in ("cumsum", "cumprod", "logcumsumexp", "logsumexp")},  # type: ignore[misc]
        **{
            n: (lambda n=n: getattr(torch, n)(x, _other(x)))  # type: ignore[misc]
            for n in ("hypot", "atan2", "copysign", "ldexp", "remainder", "fmod", "maximum", "xlogy")
        },
        "heaviside": lambda: torch.heaviside(x.detach(), _other(x)),
        "pow": lambda: (x**3, 2.0**x, x ** _other(x)),
        "floor_divide": lambda: (x // _other(x), x // 0.3),
        "lerp": lambda: torch.lerp(x, _other(x), 0.3),
        "addcmul": lambda: torch.addcmul(x, _other(x), x),
    }
    if name in cases:
        return cases[name]()
    found: Any = getattr(F, name, None) or getattr(torch, name, None)
    return found(x) if found is not None else getattr(x, name)()


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "soft_margin_loss": F.soft_margin_loss,
    "binary_cross_entropy": F.binary_cross_entropy,
    "with_logits": F.binary_cross_entropy_with_logits,
    "kl_div": F.kl_div,
    "poisson": F.poisson_nll_loss,
    "gaussian": lambda x, y: F.gaussian_nll_loss(x, y, torch.ones_like(x)),
    "hinge": F.hinge_embedding_loss,
    "cross_entropy": F.cross_entropy,
    "classes": lambda x, y: F.cross_entropy(x, torch.ones_like(y[:, 0], dtype=torch.long)),
    "mse_parts": lambda x, y: F.mse_loss(x, y, reduction="none").sum(),
    "smooth_parts": lambda x, y: F.smooth_l1_loss(x, y, reduction="sum"),
}


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.mT.contiguous().mT


FORMATS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.rand(2, 4, 6, 6),
    "channels_last": lambda: channels_last(torch.rand(2, 4, 6, 6)),
    "transposed": lambda: torch.rand(6, 6, 4, 2).permute(3, 2, 1, 0),
    "expanded": lambda: torch.rand(2, 1, 6, 1).expand(2, 4, 6, 6),
    "thin": lambda: channels_last(torch.rand(2, 4, 1, 6)),
    "one": lambda: torch.rand(1, 4, 1, 1),
    "part": lambda: channels_last(torch.rand(2, 8, 6, 7))[:, 2:6, :, 1:],
    "rows": lambda: torch.rand(3, 4, 6),
    "columns": lambda: torch.rand(3, 6, 4).mT,
    "single": lambda: torch.rand(1, 4, 1),
}
