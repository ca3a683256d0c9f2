"""Propagation of Lipschitz constants and token norms through the operations of a model's own ``forward``.

``torch.fx`` records the operations, one run on an example gives all shapes, and each operation on tokens
has a rule here or is refused by name. Operations on anything else, such as shapes, are carried out.
Rules and proofs: documentation page "Enforce: layers with a constant that is proved", section "Models with a
forward of their own".
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from howsmooth.errors import ArgumentError, CertificateError, HowsmoothError, reason
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.certificates.module_propagation import ModuleRow, attention_block, kind_of, refusal, walk
from howsmooth.nn.certificates.torch_module_constants import Reach, linear_reach, rule_of
from howsmooth.nn.checks import check, check_ball, norm_above
from howsmooth.nn.lipschitz_module import LipschitzModule
from howsmooth.nn.parts.embedding_and_pooling import Patches
from howsmooth.rounding import above, times

__all__ = ["walk_graph"]

_SOURCE = 'models with a forward of their own, howsmooth documentation, "Enforce"'


@dataclass(frozen=True)
class _State:
    """Bounds on one tensor of the forward pass. ``shape`` is its shape in the run on the example input.

    ``constant`` bounds the Lipschitz constant of the map from the model's input to this tensor, and
    ``radius`` the norms of its tokens. ``tokens`` are the axes that number the tokens; axis 0 is the batch,
    and all other axes number the entries of a token. It is None for images, whose tokens are patches. A
    ``pair`` is the output of an attention layer, tokens and attention weights.
    """

    constant: float
    radius: float
    shape: tuple[int, ...]
    tokens: tuple[int, ...] | None
    pair: bool = False

    @property
    def length(self) -> int:
        return math.prod(self.shape[axis] for axis in self.tokens or ())


class _Recorder(fx.Tracer):
    """Each PyTorch module but Sequential, and each of known constant, becomes a single node."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        torchs = kind_of(m).__module__.startswith("torch.nn.") and not isinstance(m, nn.Sequential)
        return torchs or isinstance(m, LipschitzModule) or rule_of(kind_of(m)) is not None


def walk_graph(model: nn.Module, inputs: Tensor, length: int, radius: float) -> Reach:
    """Propagate Lipschitz constants through the operations of a model's ``forward``, run on ``inputs``."""
    random = _random_states(inputs.device)
    graph, again = _recorded(model), _recorded(model)
    # Tensors that the forward creates get new names whenever it is recorded.
    if len({re.sub(r"_tensor_constant\d+", "", str(one)) for one in (graph, again)}) > 1:
        why = "computes something else whenever it is called, so it is not a fixed function"
        raise refusal(model, "", why)
    follower = _Follower(fx.GraphModule(model, graph), inputs, length, radius)
    last = follower.follow()
    if not all(map(torch.equal, random, _random_states(inputs.device))):
        raise refusal(model, "", "draws random numbers, so it is not a fixed function")
    return Reach(last.constant, last.radius, last.length, rows=follower.rows())


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _recorded(model: nn.Module) -> fx.Graph:
    try:
        return _Recorder().trace(model)
    except HowsmoothError:
        raise
    except Exception as error:  # what a forward does may raise any error with tensors that have no values
        why = f"has a forward that torch.fx cannot record: {str(error).partition('. ')[0]}"
        radius = "howsmooth.bounds.robust_radius(model, inputs) proves a radius"
        hint = f"For one input of a classifier of transformers, {radius}." if hasattr(model, "config") else ""
        raise refusal(model, "", why, hint) from error


class _Follower(fx.Interpreter):
    """An interpreter that runs the recorded graph on an example, and bounds each node for all inputs.

    A node that depends on the input through shapes alone has no bounds. The gate of a node is the last node
    before it that every path from the input goes through. What lies between, such as the branch of a
    residual, has rows one level deeper.
    """

    def __init__(self, module: fx.GraphModule, inputs: Tensor, length: int, radius: float) -> None:
        super().__init__(module)
        self.extra_traceback = False  # the lines that it adds to errors name no line of the model
        self._inputs, self._length, self._radius = inputs, length, radius
        self._nodes = list(module.graph.nodes)
        self._states: dict[fx.Node, _State] = {}
        self._rows: dict[fx.Node, tuple[ModuleRow, ...]] = {}
        self._gates: dict[fx.Node, fx.Node] = {}

    def rows(self) -> tuple[ModuleRow, ...]:
        # Without those of operations whose results are not used.
        used = self._between(self._nodes[0], self._nodes[-1])
        return tuple(row for node, rows in self._rows.items() if node in used for row in rows)

    def follow(self) -> _State:
        try:
            with torch.no_grad():
                self.run(self._inputs)
        except (HowsmoothError, NotImplementedError):
            raise
        except (RuntimeError, IndexError, TypeError, ValueError, AssertionError) as error:
            got = f"{self._inputs.shape} ({reason(error)})"
            raise ArgumentError("inputs", expected="an input that the model takes", got=got) from error
        last = self._nodes[-1].args[0]  # the last node is the output
        state = self._states.get(last) if isinstance(last, fx.Node) else None
        if state is None or state.pair or state.tokens is None:
            raise CertificateError("", kind="output", reason="is not one tensor of tokens or of logits")
        if state.tokens == (2,):  # the rows of the output consist of entries of all tokens
            return replace(state, tokens=(1,), radius=above(math.sqrt(state.length) * state.radius, 8))
        return state

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "placeholder":
            if n is not self._nodes[0]:
                return value  # an optional argument, with its default value
            tokens = {2: (), 3: (1,)}.get(value.ndim)
            self._states[n] = state = _State(1.0, self._radius, tuple(value.shape), tokens)
            images, fits = value.ndim == 4, tokens is not None and state.length == self._length
            expected = f"tokens (batch, {self._length}, d), or images (batch, channels, height, width)"
            check(images or fits, "inputs", expected, f"shape {state.shape}")
        elif n.op != "output" and any(one in self._states for one in n.all_input_nodes) and not _is_shape(n):
            # Shapes are the same for all inputs, so values computed from them alone need no bounds.
            self._states[n] = self._state(n, value)
            self._gates[n] = gate = self._gate(n)
            if n.op != "call_module":
                self._rows[n] = self._row(n, gate)
            for between in self._between(gate, n):
                rows = self._rows.get(between, ())
                self._rows[between] = tuple(replace(row, level=row.level + 1) for row in rows)
        return value

    def _gate(self, node: fx.Node) -> fx.Node:
        found = {one for one in node.all_input_nodes if one in self._states}
        while len(found) > 1:
            last = max(found, key=self._nodes.index)
            found = found - {last} | {self._gates[last]}
        return found.pop()

    def _between(self, gate: fx.Node, node: fx.Node) -> set[fx.Node]:
        """Return the nodes on paths between ``gate`` and ``node`` that have bounds, without these two."""
        found, reached = set[fx.Node](), [node]
        while reached:
            before = {one for one in reached.pop().all_input_nodes if one in self._states} - found - {gate}
            found |= before
            reached += before
        return found

    def _row(self, node: fx.Node, gate: fx.Node) -> tuple[ModuleRow, ...]:
        """Return the row for all operations between two nodes, or none if they change no bound."""
        first, last = self._states[gate], self._states[node]
        if (first.constant, first.radius) == (last.constant, last.radius):
            return ()
        # The constant of the gate is a factor of that of the node, unless it is zero or infinite.
        known = 0 < first.constant < math.inf
        constant = above(last.constant / first.constant, 8) if known else math.inf
        name = getattr(node.target, "__name__", str(node.target))
        radii, lengths = (first.radius, last.radius), (first.length, last.length)
        return (ModuleRow(node.name, name, 0, constant, *radii, *lengths, _SOURCE),)

    def _state(self, node: fx.Node, value: Any) -> _State:
        found: _State | str
        if node.op == "call_module":
            found = self._of_module(node, value)
            if isinstance(found, str):
                raise refusal(self.fetch_attr(str(node.target)), str(node.target), found)
        else:
            found = self._of_operation(node, value)
            if isinstance(found, str):
                name = getattr(node.target, "__name__", str(node.target))
                raise CertificateError(node.name, kind=name, reason=found, remedy=_REMEDY)
        if math.isnan(found.constant) or math.isnan(found.radius):
            raise CertificateError(node.name, kind=str(node.target), reason="has a constant that is NaN")
        return replace(found, radius=check_ball(found.radius))

    def _of_operation(self, node: fx.Node, value: Any) -> _State | str:
        rule = _RULES.get(node.target)
        if rule is None:
            return "is an operation without a rule"
        states = [self._states[one] for one in node.all_input_nodes if one in self._states]
        if rule is not _getitem and any(one.pair or one.tokens is None for one in states):
            return "is called with images, or with the pair that an attention layer returns"

        def given(one: fx.Node) -> Any:
            return self._states.get(one, self.env.get(one))

        arguments, keywords = fx.node.map_arg((node.args, node.kwargs), given)
        try:
            return rule(value, *arguments, **keywords)
        except TypeError:
            return "is called with arguments for which there is no rule"

    def _of_module(self, node: fx.Node, value: Any) -> _State | str:
        path = str(node.target)
        module = self.fetch_attr(path)
        states = [self._states.get(one) for one in node.args if isinstance(one, fx.Node)]
        state = states[0] if states else None
        if state is None or any(one is not node.args[0] for one in node.args):
            return "is called with something else than the same tokens"
        attends = isinstance(module, LipschitzAttention | nn.MultiheadAttention)
        values = fx.node.map_arg(node.kwargs, self.env.get)
        given = {name for name, one in values.items() if one is not None}
        unknown = given - ({"need_weights", "average_attn_weights"} if attends else set())
        if unknown or (attends and isinstance(module, nn.MultiheadAttention) and len(node.args) != 3):
            return f"is called with {', '.join(sorted(unknown)) or 'arguments'} for which there is no rule"
        if "forward" in vars(module):
            return "has a forward that was replaced after it was built"
        if state.tokens is None:
            return self._of_images(module, node, state, value)
        tokens = len(state.shape) == 3 and state.tokens == (1,)
        if state.pair or not (tokens or (len(state.shape) == 2 and not attends)):
            return "is called with something else than tokens (batch, n, d) or vectors (batch, d)"
        certified = attention_block(module, state.length) if attends else module
        if isinstance(certified, str):
            return certified
        step = walk(certified, state.length, state.radius, path)
        self._rows[node] = (replace(step.rows[0], kind=kind_of(module).__name__),) if attends else step.rows
        first = value[0] if attends else value
        if not isinstance(first, Tensor) or first.ndim not in (2, 3):
            return "returns something else than tokens (batch, n, d) or vectors (batch, d)"
        axes = (1,) if first.ndim == 3 else ()
        constant = above(times(step.constant, state.constant), 8)
        found = _State(constant, step.radius, tuple(first.shape), axes, pair=attends)
        if found.length != step.length:
            return f"returns {found.length} tokens, where its certificate counts {step.length}"
        return found

    def _of_images(self, module: nn.Module, node: fx.Node, state: _State, value: Any) -> _State | str:
        """Bound the tokens that a convolution or Patches makes of images, or say why this is impossible."""
        if self._rows:
            return "cuts the images a second time, perhaps into other patches than those of the radius"
        if isinstance(module, Patches):
            reach = Reach(1.0, state.radius, self._length)
        elif kind_of(module).forward is nn.Conv2d.forward:
            assert isinstance(module, nn.Conv2d)
            if module.kernel_size != module.stride or module.dilation != (1, 1) or module.groups != 1:
                return "has patches that overlap or lie apart (kernel_size and stride differ), or groups"
            if module.padding not in ((0, 0), "valid"):
                return "pads images, whose patches then are not the tokens of the certificate"
            reach = linear_reach(module, self._length, state.radius)
        else:
            return (
                "has no rule for images: begin with hs.nn.Patches (ClipTokens stands behind it), or a Conv2d "
                "whose patches do not overlap"
            )
        axes = (1,) if value.ndim == 3 else (2, 3)
        constant = above(times(reach.constant, state.constant), 8)
        found, n = _State(constant, reach.radius, tuple(value.shape), axes), self._length
        check(found.length == n, "inputs", f"images of {n} patches", f"{found.length} patches")
        own = str(node.target), kind_of(module).__name__, 0, reach.constant
        self._rows[node] = (ModuleRow(*own, state.radius, reach.radius, n, n, _SOURCE),)
        return found


_REMEDY = (
    "The rules are on the documentation page 'Layers with a Lipschitz constant'. Put the operation into a "
    "class that derives from hs.nn.LipschitzModule."
)


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim")
    return node.target is getattr and node.args[1] in ("shape", "ndim", "dtype", "device")


# ---- rules: a function of the value at the example and the arguments, in which _State stands for tensors
# that depend on the input. The result is a string if there is no constant: the rest of a sentence.


Rule = Callable[..., _State | str]


def _sum(value: Tensor, one: Any, other: Any) -> _State | str:
    if isinstance(one, _State) and isinstance(other, _State):
        if one.shape != other.shape or one.tokens != other.tokens:
            return f"adds tensors of shapes {one.shape} and {other.shape}, whose tokens do not correspond"
        constant, radius = one.constant + other.constant, one.radius + other.radius
        return replace(one, constant=above(constant, 8), radius=above(radius, 8))
    state, fixed = (one, other) if isinstance(one, _State) else (other, one)
    if state.shape != tuple(value.shape):
        return "enlarges a tensor by a sum with a larger one"
    by_token = torch.as_tensor(fixed).detach().to("cpu", torch.float64).expand(state.shape)
    axes = state.tokens or ()
    by_token = by_token.movedim(axes, tuple(range(1, 1 + len(axes))))
    rows = by_token.flatten(1 + len(axes)).flatten(0, -2)
    longest = rows[torch.linalg.vector_norm(rows, dim=1).argmax()]
    return replace(state, radius=above(state.radius + norm_above("constant", longest[None]), 8))


def _product(value: Tensor, one: Any, other: Any) -> _State | str:
    if isinstance(one, _State) and isinstance(other, _State):
        return "multiplies two tensors that depend on the input, which is Lipschitz on no whole space"
    state, fixed = (one, other) if isinstance(one, _State) else (other, one)
    if state.shape != tuple(value.shape):
        return "enlarges a tensor by a product with a larger one"
    largest = float(torch.as_tensor(fixed).detach().abs().amax())
    constant, radius = times(largest, state.constant), times(largest, state.radius)
    return replace(state, constant=above(constant, 8), radius=above(radius, 8))


def _quotient(value: Tensor, one: Any, other: Any) -> _State | str:
    if isinstance(other, _State):
        return "divides by a tensor that depends on the input"
    return _product(value, one, 1 / torch.as_tensor(other, dtype=torch.float64))


def _cat(value: Tensor, tensors: Any, dim: int = 0) -> _State | str:
    if dim % value.ndim != 1 or value.ndim != 3:
        return "joins other axes than the tokens of (batch, n, d), dim=1"
    squares, radius = 0.0, 0.0
    for one in tensors:
        if isinstance(one, _State):
            if one.tokens != (1,):
                return "joins something else than tokens (batch, n, d)"
            squares, radius = squares + one.constant**2, max(radius, one.radius)
        else:
            norms = torch.linalg.vector_norm(one.detach().to("cpu", torch.float64), dim=-1)
            if not bool(torch.isfinite(norms).all()):
                return "joins numbers that are not finite"
            radius = max(radius, above(float(norms.max()), one.shape[-1] + 8))
    return _State(above(math.sqrt(squares), 2 * len(tensors) + 8), radius, tuple(value.shape), (1,))


def _getitem(value: Any, state: _State, index: Any) -> _State | str:
    if state.pair:
        return replace(state, pair=False) if index == 0 else "takes the attention weights, which have no rule"
    index = index if isinstance(index, tuple) else (index,)
    whole = slice(None)
    plain = state.tokens == (1,) and all(one == whole for one in (index[0], *index[2:]))
    if not plain or len(index) < 2 or not isinstance(index[1], int | slice) or value.ndim < 2:
        return "takes something else than tokens, x[:, index], of tokens (batch, n, d)"
    return replace(state, shape=tuple(value.shape), tokens=() if isinstance(index[1], int) else (1,))


def _mean(value: Tensor, state: _State, dim: Any = None, keepdim: bool = False) -> _State | str:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if state.tokens != (1,) or not isinstance(dim, int) or dim % 3 != 1 or keepdim:
        return "takes another mean than that of the tokens of (batch, n, d), dim=1"
    # The norm of the map from n tokens to their mean is 1/√n.
    constant = above(state.constant / math.sqrt(state.shape[1]), 8)
    return replace(state, constant=constant, shape=tuple(value.shape), tokens=())


def _flatten(value: Tensor, state: _State, start_dim: int = 0, end_dim: int = -1) -> _State | str:
    start, end = start_dim % len(state.shape), end_dim % len(state.shape)
    shape = tuple(value.shape)
    if state.tokens == (start, end) and (start, end) == (2, 3):
        return replace(state, shape=shape, tokens=(2,))
    if (start, end) == (1, len(state.shape) - 1):
        radius = above(math.sqrt(state.length) * state.radius, 8)
        return replace(state, shape=shape, tokens=(), radius=radius)
    return (
        "joins other axes than all but the batch, or those of the patches of (batch, channels, rows, columns)"
    )


def _transpose(value: Tensor, state: _State, one: int, other: int) -> _State | str:
    order = list(range(len(state.shape)))
    order[one], order[other] = order[other], order[one]
    return _permute(value, state, *order)


def _permute(value: Tensor, state: _State, *order: Any) -> _State | str:
    axes = [axis % len(state.shape) for axis in (order[0] if isinstance(order[0], tuple | list) else order)]
    if state.tokens is None or axes[0] != 0:
        return "moves the axis of the batch"
    tokens = tuple(sorted(axes.index(axis) for axis in state.tokens))
    return replace(state, shape=tuple(value.shape), tokens=tokens)


def _as_module(make: Callable[..., nn.Module]) -> Rule:
    def rule(value: Tensor, state: _State, **settings: Any) -> _State | str:
        step = walk(make(**settings), state.length, state.radius)
        return replace(state, constant=above(times(step.constant, state.constant), 8), radius=step.radius)

    return rule


def _dropout(
    value: Tensor, state: _State, p: float = 0.5, training: bool = True, inplace: bool = False
) -> _State | str:
    return "drops numbers at random, or overwrites its input" if (training and p > 0) or inplace else state


_NAMES: dict[Rule, tuple[Any, ...]] = {
    _sum: (operator.add, torch.add, "add", operator.sub, torch.sub, "sub"),
    _product: (operator.mul, torch.mul, "mul"),
    _quotient: (operator.truediv, torch.div, "div"),
    _cat: (torch.cat, torch.concat),
    _getitem: (operator.getitem,),
    _mean: (torch.mean, "mean"),
    _flatten: (torch.flatten, "flatten"),
    _transpose: (torch.transpose, "transpose"),
    _permute: (torch.permute, "permute"),
    lambda value, state: state: ("contiguous",),
    _dropout: (nn.functional.dropout,),
    _as_module(nn.ReLU): (nn.functional.relu, torch.relu, "relu"),
    _as_module(nn.GELU): (nn.functional.gelu,),
    _as_module(nn.SiLU): (nn.functional.silu,),
    _as_module(nn.Tanh): (nn.functional.tanh, torch.tanh, "tanh"),
    _as_module(nn.Sigmoid): (nn.functional.sigmoid, torch.sigmoid, "sigmoid"),
}
_RULES: dict[Any, Rule] = {name: rule for rule, names in _NAMES.items() for name in names}
"""Rules by function, and by the name of a method of tensors. Operations in place have none."""
