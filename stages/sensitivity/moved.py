"""Makes copies of a step's weights that are moved a little, as training moves them."""

from __future__ import annotations

from dataclasses import replace

import torch

from stowage.stages.sensitivity.interpreter import StepTensors

DISTANCE = 0.05
"""Standard deviation of what is added to a weight, over the root mean square of the weights of its parameter.

Several times the rounding of 8 bits, so that other elements are rounded to 0; the gradient stays about as large.
"""


def moved(live: StepTensors, seed: int) -> StepTensors:
    """Return a step's tensors with other weights; parameters that are tied stay one tensor.

    Args:
        live: the step's tensors, which stay as they are.
        seed: of what is added; no generator of the process is drawn from.
    """
    draws: dict[torch.device, torch.Generator] = {}
    made: dict[int, torch.Tensor] = {}
    for parameter in live.parameters.values():
        if id(parameter) not in made:
            weights = parameter.detach()
            if weights.device not in draws:
                draws[weights.device] = torch.Generator(weights.device).manual_seed(seed)
            made[id(parameter)] = _moved(weights, draws[weights.device])
    return replace(live, parameters={name: made[id(p)] for name, p in live.parameters.items()})


def _moved(weights: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    drawn = weights.is_complex() or (weights.is_floating_point() and weights.element_size() > 1)
    if not drawn or not weights.numel():
        return weights
    other = torch.empty_like(weights).normal_(generator=draws)
    return other.mul_(DISTANCE * float(torch.linalg.vector_norm(weights)) / weights.numel() ** 0.5).add_(weights)
