"""Small optimizers of the kinds that people bring, each the shortest of its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
Make = Callable[[nn.Module], torch.optim.Optimizer]


class _Own(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    def trained(self, group: dict[str, Any]) -> list[nn.Parameter]:
        return [p for p in group["params"] if p.grad is not None]


class Counting(_Own):
    """A warm-up that counts steps in the group, as Prodigy and schedule-free ones do."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr, k=0, weight_sum=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            for p in self.trained(group):
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 / (group["k"] + 1))
                p.sub_(average, alpha=group["lr"] * min(1.0, group["k"] / 4))


class GlobalNorm(_Own):
    """Divides by the norm of all gradients once it is above a limit, as LAMB does."""

    def __init__(self, params: Any, lr: float = 1e-2, limit: float = 1.0) -> None:
        super().__init__(params, lr, limit=limit)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in self.trained(group)]
        total = torch.stack([p.grad.norm() for p in every if p.grad is not None]).norm()
        for group in self.param_groups:
            scale = max(1.0, float(total) / group["limit"])
            for p in self.trained(group):
                p.sub_(p.grad / scale, alpha=group["lr"])


class Lamb(_Own):
    """LAMB without its norm over all parameters: Adam, scaled by each tensor's norm over that of its update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in self.trained(group):
                first = self.state[p].setdefault("first", torch.zeros_like(p))
                second = self.state[p].setdefault("second", torch.zeros_like(p))
                first.lerp_(p.grad, 0.1)
                second.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                update = first / (second.sqrt() + 1e-6)
                p.sub_(update * (p.norm() / (update.norm() + 1e-12)), alpha=group["lr"])


class Lion(_Own):
    """Lion: the sign of a mean of gradient and momentum, as its authors publish it; it goes element by element."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, lr, betas=betas, weight_decay=decay)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in self.trained(group):
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = (momentum * first).add_(p.grad, alpha=1 - first).sign_()
                p.add_(update, alpha=-group["lr"])
                momentum.mul_(second).add_(p.grad, alpha=1 - second)


class Distance(_Own):
    """An estimate in tensors of the group that all parameters add to, as D-Adaptation keeps it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            seen = group.setdefault("seen", torch.zeros(3))
            for p in self.trained(group):
                start = self.state[p].setdefault("start", p.detach().clone())
                seen[0] += (p.grad * (start - p)).sum()
            for p in self.trained(group):
                p.sub_(p.grad, alpha=group["lr"] * (1.0 + abs(float(seen[0]))))


class Noisy(_Own):
    """Langevin dynamics: noise from the global generator."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in self.trained(group):
                p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):
    """A wrapper: every second step is half undone; the count and the slow weights are its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.count = 0
        self.slow: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            if p not in self.slow:
                self.slow[p] = p.detach().clone()
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class ScheduleFree(_Own):
    """Trains at one point and evaluates at another; `step` insists on training mode."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr, k=0, train_mode=False)

    def _turn(self, on: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != on:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], 0.1 if on else 1 - 1 / 0.9)
                group["train_mode"] = on

    def train(self) -> None:
        self._turn(True)

    def eval(self) -> None:
        self._turn(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            weight = 1 / (group["k"] + 1)
            for p in self.trained(group):
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, weight)
                p.sub_(p.grad, alpha=group["lr"] * (0.9 * (1 - weight)))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


class Required(_Own):
    """An argument without a default that no group has, and none for the rate."""

    def __init__(self, params: Any, lr: float, table: list[float]) -> None:
        super().__init__(params, lr, eps=None)
        self.table = table

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in self.trained(group):
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] * self.table[state["count"] % len(self.table)])


class Projector:
    """What GaLore keeps: an object with a tensor inside."""

    __slots__ = ("basis", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.basis: torch.Tensor | None = None

    def down(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.basis is None:
            self.basis = gradient[: self.rank].clone()
        return gradient @ self.basis.T


class Projecting(_Own):
    """States that are objects, lists and dictionaries with tensors inside."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in self.trained(group):
                state = self.state[p]
                history = state.setdefault("history", [])
                if len(history) < 2:
                    history.append(torch.zeros_like(p))
                history[-1].lerp_(p.grad, 0.5)
                sums = state.setdefault("sums", {"square": torch.zeros_like(p)})
                sums["square"].add_(p.grad**2)
                if p.ndim == 2:
                    small = state.setdefault("projector", Projector(2)).down(p.grad)
                    p.sub_(small @ state["projector"].basis, alpha=1e-4)
                p.sub_(history[0] / (1 + sums["square"]), alpha=group["lr"])


class Elsewhere(_Own):
    """States in a dictionary of the optimizer's, not in `state`."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        self.buffers: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(params, lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in self.trained(group):
                buffer = self.buffers.setdefault(p, torch.zeros_like(p))
                p.sub_(buffer.mul_(0.9).add_(p.grad), alpha=group["lr"])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


JOINT: dict[str, Make] = {
    "counter in the group": lambda m: Counting(m.parameters()),
    "global norm": lambda m: GlobalNorm(m.parameters()),
    "tensors in the group": lambda m: Distance(m.parameters()),
    "noise": lambda m: Noisy(m.parameters()),
    "wrapper": lambda m: Lookahead(adamw(m)),
}

ALONE: dict[str, Make] = {
    "required arguments": lambda m: Required(m.parameters(), 1e-2, [1.0, 0.5]),
    "nested states": lambda m: Projecting(m.parameters()),
    "states elsewhere": lambda m: Elsewhere(m.parameters()),
}
