"""Mixed precision as FSDP2 has it: which types a policy gives, and a model that computes in them while it is traced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.utils import _apply_to_tensors

from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.parallel import ParameterGroup
from stowage.stages.optimizers import KnownOptimizer, StateForm
from stowage.stages.optimizers.states import KeptStates
from stowage.stages.runtime.files.weights import absent

UPDATE_TEMPORARIES = 2
"""Tensors like a parameter that AdamW makes while it updates it."""

_TYPES = ("param_dtype", "reduce_dtype", "output_dtype")


def check_policy(policy: object) -> None:
    """Check that a policy of mixed precision is one that FSDP2 can carry out.

    Raises:
        ParameterError: it is no policy, or it names something else than types of floating-point numbers.
    """
    if policy is None:
        return
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ParameterError(
            f"mixed_precision is a {type(policy).__name__}: give a MixedPrecisionPolicy of torch.distributed.fsdp, or "
            "None."
        )
    for name in _TYPES:
        dtype: object = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ParameterError(
                f"mixed_precision has {name}={dtype!r}: give a floating-point type such as torch.bfloat16, or None."
            )
    if not isinstance(policy.cast_forward_inputs, bool):
        raise ParameterError(
            f"mixed_precision has cast_forward_inputs={policy.cast_forward_inputs!r}: give True or False."
        )


def policy_content(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """Return a policy as plain values, with types by name."""
    content = {f.name: getattr(policy, f.name) for f in fields(MixedPrecisionPolicy)}
    return {k: _name(v) if isinstance(v, torch.dtype) else v for k, v in content.items()}


def policy_of(content: Mapping[str, Any]) -> MixedPrecisionPolicy:
    """Return the policy of what `policy_content` returned."""
    return MixedPrecisionPolicy(**{k: getattr(torch, v) if isinstance(v, str) else v for k, v in content.items()})


def policy_text(policy: MixedPrecisionPolicy) -> str:
    """Return what a policy does, for people."""
    parts = [
        f"weights gathered in {_name(policy.param_dtype)}" if policy.param_dtype else "weights gathered as stored",
        f"gradients reduced in {_name(reduced)}"
        if (reduced := reduce_dtype(policy))
        else "gradients reduced as computed",
    ]
    if policy.output_dtype is not None:
        parts.append(f"outputs in {_name(policy.output_dtype)}")
    if policy.param_dtype is not None and not policy.cast_forward_inputs:
        parts.append("inputs as they are")
    return f"mixed precision: {', '.join(parts)}"


def reduce_dtype(policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """Return the type in which gradients are reduced; None for the one in which they are computed."""
    return policy.reduce_dtype or policy.param_dtype


def compute_dtype(parameter: torch.Tensor, policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the type in which a parameter is gathered."""
    return policy.param_dtype if policy.param_dtype and parameter.dtype.is_floating_point else parameter.dtype


@contextmanager
def as_computed(model: nn.Module, policy: MixedPrecisionPolicy, casting: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Let a model compute as under FSDP2 with a policy, while the block runs, on parameters without content.

    Inputs of the model itself and of the modules in `casting`, and the model's outputs, are cast; buffers are not.

    Args:
        model: the model.
        policy: the policy.
        casting: paths of the modules that `fully_shard` is called for.

    Yields:
        Name -> layout of each parameter that another one stands for.
    """
    held = [(module, dict(module._parameters)) for module in model.modules()]
    made: dict[int, nn.Parameter] = {}
    layouts: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        dtype = compute_dtype(parameter, policy)
        if dtype != parameter.dtype:
            layouts[name] = torch.empty(parameter.shape, dtype=dtype, device="meta")
            content = absent(layouts[name], parameter.device)
            made[id(parameter)] = nn.Parameter(content, requires_grad=parameter.requires_grad)

    def cast_inputs(_module: nn.Module, arguments: Any, named: Any) -> Any:
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            return arguments, named
        return _cast(arguments, policy.param_dtype), _cast(named, policy.param_dtype)

    def cast_outputs(_module: nn.Module, _arguments: Any, outputs: Any) -> Any:
        return outputs if policy.output_dtype is None else _cast(outputs, policy.output_dtype)

    with ExitStack() as stack:
        for module, parameters in held:
            stack.callback(module._parameters.update, parameters)
            module._parameters.update({k: made.get(id(p), p) for k, p in parameters.items()})
        stack.callback(model.register_forward_hook(cast_outputs).remove)
        for path in dict.fromkeys(["", *casting]):
            module = model.get_submodule(path)
            before = module.register_forward_pre_hook(cast_inputs, prepend=True, with_kwargs=True)
            stack.callback(before.remove)
        yield layouts


def _cast(item: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors wherever FSDP2 looks for them."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(cast, item)


def as_stored(
    row: ParameterGroup, model: nn.Module, policy: MixedPrecisionPolicy, optimizer: torch.optim.Optimizer | None
) -> ParameterGroup:
    """Return the row of a group, which was traced in the types of computing, with what is stored and reduced."""
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
    parameters = [model.get_parameter(name) for name in row.parameters]
    if not row.elements:
        return row
    cast = [p for p in parameters if compute_dtype(p, policy) != p.dtype]
    reduced = {p: reduce_dtype(policy) or p.dtype for p in parameters if p.requires_grad}
    return replace(
        row,
        stored_bytes=round(sum(p.numel() * p.element_size() for p in parameters) / row.elements),
        reduce_bytes=max((dtype.itemsize for dtype in reduced.values()), default=0),
        casts_gradients=any(dtype != p.dtype for p, dtype in reduced.items()),
        largest_cast=max((p.numel() for p in cast), default=0),
        update_bytes=UPDATE_TEMPORARIES
        * max((p.numel() * p.element_size() for p in reduced if id(p) in updated), default=0),
    )


class StoredStates(KnownOptimizer):
    """An optimizer that updates stored parameters, whose forms were traced in the types of computing."""

    def kept(
        self, parameters: Mapping[str, torch.Tensor], forms: Mapping[str, StateForm], device: torch.device
    ) -> KeptStates:
        """Return the states of parameters as they are stored."""
        stored = {name: replace(form, dtype=parameters[name].dtype) for name, form in forms.items()}
        return super().kept(parameters, stored, device)


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
