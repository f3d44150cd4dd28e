"""Operations on members: what code of one learner needs, beyond `torch.vmap`, to run for P of them at once.

Under `torch.vmap` a tensor that differs between members looks like that of one member and has a hidden leading axis
[P]. Operations act on each member by itself, so sums, norms and sorts never mix members. vmap has no rule for gradients
by `backward`, for random streams, and for the lists of tensors that optimisers work on: `MemberOps` supplies them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tailguard.member_axis import expanded, hidden, is_logical, logical, outside_members, stacked

Generators = Mapping[int, Sequence[torch.Generator]]
"""The members' random streams, by the `id` of the stream that the learner's code names."""


class MemberOps(TorchFunctionMode):
    """Inside it, and inside `torch.vmap` over the members, a learner's code runs for all of them."""

    def __init__(self, count: int, generators: Generators, *, traced: bool = False) -> None:
        super().__init__()
        self.count, self.generators, self.traced = count, generators, traced
        self.leaves: list[tuple[Tensor, Tensor]] = []
        """Tensors that gradients are asked for: as the learner sees them, and the leaf that autograd knows."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        rule = RULES.get(func)
        made = func(*args, **(kwargs or {})) if rule is None else rule(self, func, args, dict(kwargs or {}))
        if self.traced and not torch.is_grad_enabled():
            # A trace has no `no_grad`: what was computed inside it must be cut off one by one.
            return tree_map_only(Tensor, _cut, made) if func is not torch.Tensor.detach else made
        return made

    def each(self, value: Any) -> Any:
        """[P, ...] of a tensor, the same for all members where it does not differ; other values as they are."""
        if not isinstance(value, Tensor):
            return value
        return expanded(value, self.count)


def _cut(value: Tensor) -> Tensor:
    return value.detach() if value.is_floating_point() else value


Rule = Callable[[MemberOps, Any, tuple[Any, ...], dict[str, Any]], Any]


# --- gradients ------------------------------------------------------------------------------------------------------


def _backward(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each member's loss to its own leaves: members share no leaf, so the gradient of the sum is everyone's own."""
    if not is_logical(args[0]):
        return func(*args, **kwargs)
    loss = stacked(args[0])
    for seen, leaf in ops.leaves:
        if seen.grad is None:
            leaf.grad = None
    with outside_members():
        loss.sum().backward(**kwargs)  # type: ignore[no-untyped-call]
    for seen, leaf in ops.leaves:
        seen.grad = None if leaf.grad is None else logical(leaf.grad)
    return None


def _grad(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del ops
    (outputs, inputs), rest = (_several(part) for part in args[:2]), args[2:]
    if not any(is_logical(one) for one in outputs):
        return func(*args, **kwargs)
    values, leaves = [stacked(one) for one in outputs], [functorch.get_unwrapped(one) for one in inputs]
    with outside_members():
        found = torch.autograd.grad([value.sum() for value in values], leaves, *rest, **kwargs)
    axes = [functorch.maybe_get_bdim(one) for one in inputs]
    return tuple(hidden(slope, axis) for slope, axis in zip(found, axes, strict=True))


def _several(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _make_leaf(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = args[0]
    if not is_logical(value):
        if functorch.maybe_current_level() is None:
            return func(*args, **kwargs)
        value = logical(value.expand(ops.count, *value.shape).clone())
    with outside_members():
        leaf = stacked(value).detach().requires_grad_(*args[1:], **kwargs)
    seen = logical(leaf)
    ops.leaves.append((seen, leaf))
    return seen


def _requires_grad(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del ops, kwargs
    return functorch.get_unwrapped(args[0]).requires_grad if is_logical(args[0]) else func(*args)


def _data(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del ops, kwargs
    return args[0].detach() if is_logical(args[0]) else func(*args)


# --- random numbers -------------------------------------------------------------------------------------------------


def _draw(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every member's numbers from its own stream: those that it would draw alone."""
    members = ops.generators.get(id(kwargs.get("generator")))
    if members is None:
        return func(*args, **kwargs)
    with outside_members():
        drawn = torch.stack([func(*args, **(kwargs | {"generator": one})) for one in members])
    return logical(drawn)


# --- layers ---------------------------------------------------------------------------------------------------------


def _linear(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One batched product for all members, with its bias: in the precision that autocast asks for, as `F.linear`."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if not is_logical(weight):
        return func(*args, **kwargs)
    rows, weights, shape = ops.each(x), stacked(weight).transpose(1, 2), x.shape[:-1]
    rows = rows.reshape(ops.count, -1, rows.shape[-1])
    product = torch.bmm(rows, weights) if bias is None else torch.baddbmm(ops.each(bias).unsqueeze(1), rows, weights)
    return logical(product.view(ops.count, *shape, product.shape[-1]))


def _addcmul(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del ops
    out = kwargs.pop("out", None)
    made = func(*args, **kwargs)
    return made if out is None else out.copy_(made)


def _out_of_place(name: str) -> Rule:
    """An operation in place by way of its result, where only the other form has a rule."""

    def rule(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del ops
        if not is_logical(args[0]):
            return func(*args, **kwargs)
        return args[0].copy_(getattr(torch, name)(*args, **kwargs))

    return rule


def _to_dense(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del ops
    return args[0] if is_logical(args[0]) else func(*args, **kwargs)


def _scatter(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`scatter_` of each member's values to its own places."""
    mine, dim, index, source = args
    if not is_logical(mine):
        return func(*args, **kwargs)
    stacked(mine).scatter_(dim + 1 if dim >= 0 else dim, ops.each(index), ops.each(source), **kwargs)
    return mine


# --- lists of tensors -----------------------------------------------------------------------------------------------


def _aligned(number: Any, like: Tensor) -> Any:
    """One number for each member, [P], in a shape that multiplies [P, ...]."""
    return number.reshape(-1, *[1] * (like.dim() - 1)) if isinstance(number, Tensor) and number.dim() == 1 else number


def _same_shapes(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether the lists hold tensors of the same shapes, place by place."""
    shapes = [[one.shape if isinstance(one, Tensor) else None for one in part] for part in lists]
    return None not in shapes[0] and all(part == shapes[0] for part in shapes)


def _elementwise(method: str, *, in_place: bool) -> Rule:
    """A `torch._foreach_*` that treats every number by itself: on stacked tensors, with stacked factors."""

    def rule(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(is_logical(one) for part in args if isinstance(part, list | tuple) for one in part):
            return func(*args, **kwargs)
        mine = list(args[0])
        if in_place and not all(is_logical(one) for one in mine):
            raise ValueError(f"members: {func.__name__} would write every member's numbers to one place")
        rest = args[1:]
        if all(isinstance(part, list | tuple) or not isinstance(part, Tensor) for part in rest):
            lists = [
                [ops.each(one) for one in part] if isinstance(part, list | tuple) else part for part in (mine, *rest)
            ]
            if _same_shapes([part for part in lists if isinstance(part, list)]):
                return func(*lists, **kwargs) if in_place else [logical(one) for one in func(*lists, **kwargs)]
        made = []
        for place, one in enumerate(mine):
            value = ops.each(one)
            each = [part[place] if isinstance(part, list | tuple) else part for part in args[1:]]
            each = [_aligned(ops.each(part), value) for part in each]
            made.append(getattr(torch.Tensor, method)(value, *each, **kwargs))
        return None if in_place else [logical(value) for value in made]

    return rule


def _norms(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(is_logical(one) for one in args[0]):
        return func(*args, **kwargs)
    return [logical(torch.linalg.vector_norm(ops.each(one).flatten(1), dim=1)) for one in args[0]]


def _maxima(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(is_logical(one) for one in args[0]):
        return func(*args, **kwargs)
    return [logical(ops.each(one).flatten(1).amax(1)) for one in args[0]]


def _fused_adam(ops: MemberOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adam's step for all members, each at its own rate and count of steps."""
    if not any(is_logical(one) for one in args[0]):
        return func(*args, **kwargs)
    decoupled = func is torch._fused_adamw_
    rate, decay, eps = ops.each(kwargs["lr"]), kwargs["weight_decay"], kwargs["eps"]
    beta1, beta2 = kwargs["beta1"], kwargs["beta2"]
    for weight, gradient, mean, square, steps in zip(*args[:4], args[5], strict=True):
        w, g, m, v, count = (ops.each(one) for one in (weight, gradient, mean, square, steps))
        if decay and decoupled:
            w.mul_(_aligned(1 - rate * decay, w) if isinstance(rate, Tensor) else 1 - rate * decay)
        elif decay:
            g = g.add(w, alpha=decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        # As torch's kernel: m̂ / (√v / √(1 − β₂ᵗ) + ε).
        count = count.to(torch.float64)
        size = (rate / (1 - beta1**count)).to(w.dtype)
        root = v.sqrt().div_(_aligned((1 - beta2**count).sqrt().to(w.dtype), w)).add_(eps)
        w.sub_(_aligned(size, w) * m / root)
    return None


ELEMENTWISE = ("add", "sub", "mul", "div", "neg", "addcmul", "addcdiv", "lerp", "copy", "sqrt")
RULES: dict[Any, Rule] = {
    torch.Tensor.backward: _backward,
    torch.autograd.grad: _grad,
    torch.Tensor.requires_grad_: _make_leaf,
    torch.Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]  # a property of the C type
    torch.Tensor.data.__get__: _data,  # type: ignore[attr-defined]
    torch.randn: _draw,
    torch.rand: _draw,
    torch.randint: _draw,
    torch.randperm: _draw,
    torch.nn.functional.linear: _linear,
    torch.addcmul: _addcmul,
    torch.Tensor.scatter_: _scatter,
    torch.Tensor.addcmul_: _out_of_place("addcmul"),
    torch.Tensor.square_: _out_of_place("square"),
    torch.Tensor.lerp_: _out_of_place("lerp"),
    torch.Tensor.clamp_: _out_of_place("clamp"),
    torch.Tensor.to_dense: _to_dense,
    torch._foreach_norm: _norms,
    torch._foreach_max: _maxima,
    torch._fused_adam_: _fused_adam,
    torch._fused_adamw_: _fused_adam,
}
RULES |= {
    getattr(torch, f"_foreach_{name}"): _elementwise(name, in_place=False)
    for name in ELEMENTWISE
    if hasattr(torch, f"_foreach_{name}") and name != "copy"
}
RULES |= {
    getattr(torch, f"_foreach_{name}_"): _elementwise(f"{name}_", in_place=True)
    for name in ELEMENTWISE
    if hasattr(torch, f"_foreach_{name}_")
}
