"""What torch functions do to attention scores and weights: one rule for each function that attention code
applies to them.

After a function without a rule the result is unknown. After a function that attention does not use, such as a
sort, the result is :class:`~howsmooth.models.tracing.score_provenance.Opaque`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from howsmooth.models.tracing.axis_tracking import Unreadable, broadcast, regroup
from howsmooth.models.tracing.score_provenance import Opaque, ScoreRecord
from howsmooth.models.tracing.softmax_call import HIDES, all_true

__all__ = ["Applied", "Known"]

Known = ScoreRecord | Opaque


class Applied:
    """A call of a torch function. Some of its arguments may hold attention scores.

    ``args`` begins with the tensors of the call, also if they were passed by name.
    """

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: Callable[[Any], Known | None]
    ) -> None:
        self.func, self.kwargs = func, dict(kwargs)
        self.args = list(args) or [self.kwargs.pop(name) for name in ("input", "tensors") if name in kwargs]
        if len(self.args) == 1 and "other" in kwargs:
            self.args.append(self.kwargs.pop("other"))
        self._rule, places, self._of_opaque = _RULES.get(func, (_unknown, 1, True))
        several = self._rule is _joined and self.args and isinstance(self.args[0], list | tuple)
        #: The records of the arguments in which the function may have scores.
        self.records = [known(tensor) for tensor in (self.args[0] if several else self.args[:places])]
        found = [record for record in self.records if record is not None]
        self.first = found[0] if found else None
        self.both = len(found) > 1  # whether more than one argument has a record
        self.leads = bool(found) and self.records[0] is not None  # whether the first argument has one
        if func in _IN_PLACE and found and not self.leads:
            self.args[0] = self.args[0].clone()  # the function overwrites it with the result
        self.result: Any = None

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument of the call, whether it was passed by position or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def other(self) -> Any:
        """For a function of two tensors, the operand beside the attention scores."""
        return self.args[1] if self.leads else self.args[0]

    def record(self, known: Known, result: Any) -> tuple[Any, Known | None]:
        """Return the tensor that the call computed or overwrote, and a record of how it follows from queries
        and keys. ``known`` is the record of the first argument that has one.
        """
        self.result = result
        changed = self.args[0] if result is None else result
        if isinstance(result, tuple) and result:
            changed = result[0]  # as of ``topk``
        if isinstance(known, Opaque) and not self._of_opaque:
            return changed, known
        try:
            return changed, self._rule(known, self)
        except Unreadable as reason:
            return changed, Opaque(str(reason), known.probabilities)

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(getattr(self.func, "__name__", self.func)).strip("_")


# A rule gives the record of the result of a function. Its first argument is the first record among those of
# the function's arguments.


def _number(value: Any) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "__float__") and not isinstance(value, Tensor))


def _multiplied(known: ScoreRecord, call: Applied, inverse: bool = False) -> Known:
    factor = call.other
    if call.both or call.kwargs.get("rounding_mode") is not None:
        raise known.unreadable("are multiplied by other numbers")
    if known.probabilities:
        # Models multiply probabilities by a mask of heads, which is all ones unless heads are pruned.
        ones = factor == 1 if _number(factor) else all_true(factor == 1) and factor.ndim <= len(known.axes)
        return known if ones else known.before_softmax("are multiplied by other numbers")
    if _number(factor):
        return known.times(1 / float(factor) if inverse and factor else float(factor))
    return known.times_tensor(factor, inverse=inverse)


def _divided(known: Known, call: Applied) -> Known | None:
    if not call.leads:
        return None  # scores are the divisor
    return known if isinstance(known, Opaque) else _multiplied(known, call, inverse=True)


def _added(known: Known, call: Applied, mine: float = 1.0, theirs: float = 1.0) -> Known:
    # The sum of two products of queries and keys, such as content and position, is refused with a message
    # that says so. In the sum of one product and a tensor without a record, this tensor is a bias.
    after = [record is not None and record.probabilities for record in call.records]
    if call.both and not any(after) and any(isinstance(record, ScoreRecord) for record in call.records):
        raise Unreadable("its scores are a sum of several products of the tokens")
    if isinstance(known, Opaque):
        return known
    if call.both or known.probabilities:
        raise known.unreadable("are added to")
    theirs *= float(call.kwargs.get("alpha", 1.0))
    if not call.leads:
        mine, theirs = theirs, mine
    known = known if mine == 1 else known.times(mine)
    return known.plus(call.other, theirs) if isinstance(call.other, Tensor) else known


def _converted(known: ScoreRecord, call: Applied) -> Known | None:
    dtype = call.result.dtype
    return known.rounded(dtype) if dtype.is_floating_point else None


def _unchanged(known: ScoreRecord, call: Applied) -> Known | None:
    # That a function such as ``clamp`` leaves the scores as they are is checked when the attention is
    # complete, by computing its output again.
    same = isinstance(call.result, Tensor) and call.result.shape == call.args[0].shape
    return replace(known, approximate=True) if same else None


def _reshaped(known: ScoreRecord, call: Applied) -> Known | None:
    if call.result.numel() == call.args[0].numel():
        return replace(known, axes=regroup(known.axes, call.result.shape))
    return replace(known, axes=broadcast(known.axes, call.result)[0])  # ``expand``


def _permuted(known: ScoreRecord, call: Applied) -> Known:
    # The function is applied to a meta tensor with axes of length 1, 2, 3, ..., which shows the permutation.
    lengths = torch.empty(tuple(range(1, call.args[0].ndim + 1)), device="meta")
    marked = call.func(lengths, *call.args[1:], **call.kwargs)
    return replace(known, axes=tuple(known.axes[size - 1] for size in marked.shape))


def _indexed(known: ScoreRecord, call: Applied) -> Known | None:
    index = call.argument(1, "dim")  # of ``narrow``
    index = index if isinstance(index, tuple) else (index,)
    whole = call.result.numel() == call.args[0].numel()
    if whole and all(i is None or isinstance(i, slice) or i is ... for i in index):
        return _reshaped(known, call)
    return known.cut(call.args[0], call.result)


def _joined(known: ScoreRecord, call: Applied) -> Known:
    # A single tensor that is joined to scores may hold their sinks; ``ScoreRecord.joined`` decides.
    tensors = call.args[0]
    if known.probabilities or len(tensors) != 2 or call.both:
        raise known.unreadable("are joined to others")
    dim = call.argument(1, "dim", call.kwargs.get("axis", 0))
    return known.joined(tensors[call.leads], dim % call.result.ndim, first=not call.leads)


def _filled(known: ScoreRecord, call: Applied) -> Known:
    return _overwritten(known, call.argument(1, "mask"), call.argument(2, "value"))


def _chosen(known: ScoreRecord, call: Applied) -> Known | None:
    if call.both:
        raise known.unreadable("are chosen among others")
    if len(call.args) != 3:
        return None
    condition, first, second = (1, 0, 2) if call.func is Tensor.where else (0, 1, 2)
    # The first tensor is kept where the condition is true, so the second one is written elsewhere.
    if call.records[first] is not None:
        return _overwritten(known, ~call.args[condition], call.args[second])
    return _overwritten(known, call.args[condition], call.args[first])


def _overwritten(known: ScoreRecord, pairs: Tensor, value: Any) -> Known:
    if known.probabilities:
        # The probabilities of hidden keys are zero already; if they are not, the check of all rows fails.
        return replace(known, approximate=True)
    if all_true(value <= HIDES) if isinstance(value, Tensor) else _number(value) and value <= HIDES:
        return known.hiding(pairs.bool())
    raise Unreadable("its scores are written over by other numbers")


def _unknown(known: Known, call: Applied) -> Known | None:
    """Return what is known after a function without a rule. Raise Unreadable if it overwrote scores."""
    if call.result is not None and call.result is not call.args[0]:
        return None
    if isinstance(known, Opaque):
        return known
    raise known.unreadable(f"are written over by {call.name}")


def _softmax(known: Known, call: Applied) -> Known | None:
    dim = call.argument(1, "dim")
    if known.probabilities:
        return None  # a second softmax is no attention
    if isinstance(known, Opaque):
        return replace(known, probabilities=True, mixed=False)
    return known.softmax(dim, call.result.dtype) if isinstance(dim, int) else None


def _dropped(known: ScoreRecord, call: Applied) -> Known:
    training = call.argument(2, "training", call.kwargs.get("train", True))
    if training and call.argument(1, "p", 0.5) > 0:
        raise known.unreadable("are dropped at random")
    return known


def _refused(known: ScoreRecord, call: Applied, what: str = "") -> Known:
    raise known.unreadable(what or f"go through {call.name}")


def _mixed(known: Known, call: Applied) -> Known | None:
    """Describe scores that a function, such as a sort, has mixed. Return None if they were mixed before."""
    if isinstance(known, Opaque):
        return None if known.mixed else replace(known, mixed=True)
    return Opaque(str(known.unreadable(f"go through {call.name}")), known.probabilities, mixed=True)


def _functions(names: str) -> set[Any]:
    homes = (torch, Tensor, functional, torch.special)
    found = {getattr(home, name) for name in names.split() for home in homes if hasattr(home, name)}
    return {
        f.__get__ if isinstance(f, property) or type(f).__name__ == "getset_descriptor" else f for f in found
    }


Rule = Callable[[Any, Applied], Known | None]
_IN_PLACE = _functions("add_ sub_ subtract_ mul_ multiply_ __iadd__ __isub__ __imul__")
# A rule, the number of arguments in which its functions may have scores, and the functions. The first rules
# take any record; after the others an Opaque is what it was.
_OF_ALL: tuple[tuple[Rule, int, str], ...] = (
    (_divided, 2, "div divide true_divide div_ divide_ true_divide_"),
    (_divided, 2, "__truediv__ __itruediv__ __div__ __idiv__"),
    (_added, 2, "add add_ __add__ __radd__ __iadd__"),
    (partial(_added, theirs=-1.0), 2, "sub subtract sub_ subtract_ __sub__ __isub__"),
    (partial(_added, mine=-1.0), 2, "rsub __rsub__"),
    (_softmax, 1, "softmax"),
    (_mixed, 1, "linear conv1d conv2d relu square exp sigmoid sum cumsum detach batch_norm layer_norm"),
)
_OF_SCORES: tuple[tuple[Rule, int, str], ...] = (
    (_multiplied, 2, "mul multiply mul_ multiply_ __mul__ __rmul__ __imul__"),
    (lambda known, call: known.before_softmax("are negated").times(-1.0), 1, "neg neg_ negative __neg__"),
    (lambda known, call: known.before_softmax("are capped").capped(), 1, "tanh tanh_"),
    (_converted, 1, "to float double half bfloat16 type type_as contiguous clone cpu cuda"),
    (_unchanged, 1, "clamp clamp_ clip clip_ clamp_min clamp_max maximum max nan_to_num nan_to_num_"),
    (_reshaped, 1, "view reshape view_as reshape_as flatten unflatten squeeze unsqueeze squeeze_ unsqueeze_"),
    (_reshaped, 1, "expand expand_as broadcast_to"),
    (_permuted, 1, "transpose permute swapaxes swapdims movedim moveaxis t T mT H mH adjoint"),
    (_indexed, 1, "__getitem__ narrow"),
    (_joined, 1, "cat concat concatenate"),
    (_filled, 1, "masked_fill masked_fill_"),
    (_chosen, 3, "where"),
    (_dropped, 1, "dropout dropout_ alpha_dropout feature_dropout"),
    # What selects, shifts or sorts scores still derives from a product of queries and keys.
    (_refused, 1, "gather take_along_dim index_select pad roll flip as_strided sort topk unfold"),
    (partial(_refused, what="are put together from pieces"), 3, "__setitem__"),
)
_RULES = {
    function: (rule, places, of_opaque)
    for table, of_opaque in ((_OF_ALL, True), (_OF_SCORES, False))
    for rule, places, names in table
    for function in _functions(names)
}
