"""Capture of a model as a map of tokens: of the whole model, from its embeddings to an output, or of a range
of its blocks.

The map runs a copy of the model, and its output is compared with that of the model itself, at the tokens of
the forward pass and at changed ones. A block is the smallest numbered layer of the model around an attention.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from howsmooth.errors import (
    ArgumentError,
    CaptureError,
    DerivativeError,
    HowsmoothError,
    NonFiniteError,
    reason,
)
from howsmooth.functional import register
from howsmooth.jacobian.autodiff import AutodiffJacobian, moved_by_rounding
from howsmooth.models.captured_layer import Site
from howsmooth.models.finite_weights import naming_weights
from howsmooth.models.float32_weights import computing_dtype, device_of
from howsmooth.models.identification.model_part_map import (
    ModelMap,
    ModelPart,
    Output,
    Passage,
    Place,
    copied,
    frozen_copy,
    observed,
    replaced,
    rows,
)
from howsmooth.models.identification.self_attention_module import kept_tensors, moved_tokens
from howsmooth.models.inputs.model_inputs import embedding_of, takes_decoder_ids
from howsmooth.models.measurement_mode import implementation
from howsmooth.models.model_call import ModelCall
from howsmooth.models.padded_sequences import one_by_one, padding_of
from howsmooth.models.tolerance import lowest_epsilon, relative_error, tolerance
from howsmooth.models.tracing.attention_recorder import AttentionLayer, run_once, trace_forward_pass
from howsmooth.models.tracing.module_replay import first_tensor
from howsmooth.watching import Call, StopForward, notice_downcasts, watched

__all__ = ["ModelParts"]

# From so many tokens on, attention is computed without a matrix of all pairs of tokens.
_LONG = 1024
# How many shifts of the tokens by one machine epsilon show the growth of rounding errors.
_SHIFTS = 2


# How many places before the first block are tried as the place of the embedded tokens.
_EARLIER = 4


class _PassedBy(CaptureError):  # noqa: N818 - says what was found
    """The error for a part of a model whose output also depends on tokens that bypass its beginning."""


class ModelParts:
    """The parts of a model, each as a map from the tokens at one point of the forward pass to those at a
    later point. Points are the embeddings, the inputs and outputs of the Transformer blocks, and the model's
    outputs.

    ``given`` is the model, in measurement mode, with its inputs. In an encoder-decoder, ``side`` says which
    embeddings vary: ``"memory"``, the encoder's, or ``"queries"``, the decoder's; CaptureError is raised
    without it, and ArgumentError if there is no such side or padding, but of one sequence if ``padded``.
    """

    def __init__(self, given: ModelCall, side: str | None = None, *, padded: bool = False) -> None:
        model = given.model
        if side is not None and (side == "joint" or not takes_decoder_ids(model)):
            expected = "'queries' or 'memory' with scope 'model' of an encoder-decoder, else None"
            raise ArgumentError("side", expected=expected, got=repr(side))
        if takes_decoder_ids(model) and side is None:
            raise CaptureError(
                f"{type(model).__name__} is an encoder-decoder, whose output depends on two sequences. Take "
                'its encoder alone, with part="encoder"; or capture it with scope '
                "'model' and side='queries', from the decoder's embeddings, or side='memory', from the "
                "encoder's."
            )
        self.side = side
        self.model = model
        self.given = [given] if padded and given.batch == 1 else _sequences_of(given)
        self.blocks: list[Place] = []  # the outputs of the blocks around the layers; two may share one
        calls: dict[nn.Module, int] = {}
        # Calls of embedding tables, each with its number among the calls of the table, and what it is given.
        self._embedded: list[tuple[nn.Embedding, int, object]] = []
        self._early: list[Place] = []  # tokens before the first block, which may be those of the whole model
        self._ids = given.named.get("input_ids") if self._known else next(iter(given.named.values()))

        def starts(call: Call) -> None:
            calls[call.module] = call.number
            if isinstance(call.module, nn.Embedding):
                self._embedded.append((call.module, call.number, call.args[0] if call.args else None))

        def ends(call: Call) -> None:
            if not self.blocks and isinstance(call.output, Tensor) and call.output.ndim == 3:
                self._early.append(Place(call.name, "output", call.number))
            if call.module is model:
                self._returns_hidden = getattr(call.output, "last_hidden_state", None) is not None

        def seen(layer: AttentionLayer) -> None:
            self.blocks.append(Place(layer.root_name, "output", calls[layer.root]))

        with watched(dict(model.named_modules()), starts, ends):
            self.layers, _ = trace_forward_pass(given, (), seen)
        self._calls = calls  # the number of the last call of each module that ran

    def whole(self, output: str, *, last_token: bool = False) -> Site:
        """Return the map from the embeddings to an output of the model, such as "logits".

        ``output`` is one of ``howsmooth.scopes.OUTPUTS``.
        """
        of = {None: "its", "queries": "its decoder's", "memory": "its encoder's"}[self.side]
        start, end, read = self._embeddings(), self._end(output), self.output(output, last_token=last_token)
        words = f"from {of} embeddings to its {_in_words(read)}"
        try:
            return self._site("model", start, end, read, None, None, words)
        except _PassedBy:
            # A residual around the first block: the tokens enter it a little earlier.
            for earlier in reversed(self._early[-_EARLIER:]):
                with suppress(_PassedBy):
                    return self._site("model", earlier, end, read, None, None, words)
            raise

    def output(self, output: str, *, last_token: bool = False) -> Output:
        """Return the :class:`Output` with a given name, such as "hidden", "logits" or "margin".

        The hidden states of a model that transformers does not know are the first tensor that it returns, and
        so are its logits if it names none.
        """
        if self._known:
            return Output(output, last_token)
        return Output("tokens" if output == "hidden" else output, last_token, unnamed=True)

    def span(self, first: int, last: int, *, last_token: bool = False) -> Site:
        """Return the map from the input of block ``first`` to the output of block ``last``.

        A block is named by the index of an attention layer in it.
        """
        blocks = f"blocks {first} to {last}" if last > first else f"block {first}"
        words = f"{blocks}, their output {_of_tokens(last_token)}"
        start, end = self._input(self.blocks[first]), self.blocks[last]
        return self._site("span", start, end, Output("tokens", last_token), first, last, words)

    def with_mlp(self, layer: int, scope: str) -> Site:
        """Return the map of the MLP in a layer's block, or in scope "whole-block" of this block.

        The MLP is the smallest module with all weights of the block beside those of attention. If that is the
        block itself, the map goes from the input of the first module with weights to the output of the last.
        """
        block, ends = self._mlp(self.blocks[layer])
        if not ends:
            raise CaptureError(f"In {block} no MLP is found: weights beside attention, in modules run once.")
        start, end = self._input(block), block
        if scope == "mlp":
            start, end = Place(ends[0], "input", block.call), Place(ends[-1], "output", block.call)
        return self._site("span", start, end, Output("tokens"), layer, layer, f"{scope} of block {layer}")

    def experts(self, layer: int) -> list[tuple[str, Tensor, ModelMap]]:
        """Return the experts of a layer's block: path, which tokens go there, and map without a weight."""
        block, calls = self._mlp(self.blocks[layer])[0], list[Call]()
        outer = re.sub(r"(\.\d+)\..*", r"\1", block.module)  # a block may be a part of a larger one
        modules = {name: module for name, module in self.model.named_modules() if _within(name, outer)}
        with watched(modules, ends=calls.append):
            run_once(self.given[0])
        calls = [call for call in calls if call.number == block.call and hasattr(call.module, "num_experts")]
        calls = [call for call in calls if len(call.arguments()) == 3]  # those of routers have fewer
        if not calls and not any("expert" in name for name in modules):
            return []
        try:
            (call,) = calls
            return list(_experts(call, computing_dtype(self.model)))
        except Exception as error:  # a model may raise any error if it runs with one expert
            raise CaptureError(
                f"The experts in {block} are not one module that is given tokens (n, d), the numbers (n, k) "
                "of their experts and weights (n, k), and returns the weighted sum, as that of Mixtral."
            ) from error

    def _mlp(self, block: Place) -> tuple[Place, list[str]]:
        """Return the block with the MLP, itself or the one around it, and the modules of the MLP, if any."""
        names = {module: name for name, module in self.model.named_modules()}
        ran = {names[module]: last for module, last in self._calls.items() if module in names}
        inside = [name for name in ran if name != block.module and _within(name, block.module)]
        attentions = [one.name for one in self.layers if _within(one.name, block.module)]
        # The outermost module of the block around each attention, which also has its projections.
        around = [next((name for name in inside if _within(one, name)), block.module) for one in attentions]
        apart = [
            name
            for name in inside
            if not any(_within(*two) for a in around for two in ((a, name), (name, a)))
        ]
        owned = {name: self.model.get_submodule(name).parameters(recurse=False) for name in apart}
        weights = [name for name in apart if any(p.ndim > 1 for p in owned[name])]
        ends = [name for name in apart if all(_within(one, name) for one in weights)][-1:] or weights
        if weights and {ran[ends[0]], ran[ends[-1]]} == {ran.get(block.module)}:
            return block, ends
        wider = re.match(r"(.*\.\d+)\.", block.module)  # a list of layers in a list of blocks, as in T5
        if wider and sum(_within(one.module, wider[1]) for one in self.blocks) == 1:
            return self._mlp(replace(block, module=wider[1]))
        return block, []

    @property
    def last_layers(self) -> list[int]:
        """The index of the last attention layer in each Transformer block, in the order of the blocks."""
        return [
            i
            for i, place in enumerate(self.blocks)
            if i + 1 == len(self.blocks) or self.blocks[i + 1] != place
        ]

    def entry(self) -> Site | None:
        """Return the map from the embeddings to the input of the first block. Return None if they are the
        same point.
        """
        start, end = self._embeddings(), self._input(self.blocks[0])
        if start == end:
            return None
        words = "from its embeddings to the input of its first block"
        return self._site("span", start, end, Output("tokens"), None, -1, words)

    def from_first(self, output: str, *, last_token: bool = False) -> Site:
        """Return the map from the input of the first block of the model to an output of the model."""
        start, read = self._input(self.blocks[0]), self.output(output, last_token=last_token)
        words = f"from the input of its first block to its {_in_words(read)}"
        return self._site("span", start, self._end(output), read, 0, None, words)

    def until(self, last: int) -> Site:
        """Return the map from the embeddings to the output of the block that holds the attention layer
        ``last``.
        """
        words = f"from its embeddings to the output of block {last}"
        return self._site("span", self._embeddings(), self.blocks[last], Output("tokens"), None, last, words)

    def beyond(self, layer: int, output: str, *, last_token: bool = False) -> Site:
        """Return the map from the output of the block that holds an attention layer to the model's output."""
        start, end = self.blocks[layer], self._end(output)
        read = self.output(output, last_token=last_token)
        words = f"from the output of block {layer} to its {_in_words(read)}"
        return self._site("span", start, end, read, layer + 1, None, words)

    @property
    def _known(self) -> bool:
        return isinstance(self.model, PreTrainedModel)

    def _embeddings(self) -> Place:
        """Return where the embedded tokens are: an argument, a table's output, or before the first block."""
        if self.side is not None:
            return self._embeddings_of_side()
        named = self.given[0].named
        main = "inputs_embeds" if self._known else next(iter(named))
        if main in named and named[main].is_floating_point() and named[main].ndim <= 3:
            return Place("", "input", argument=main)
        table = embedding_of(self.model)
        for module, call, ids in self._embedded if self._ids is not None else ():
            # The module that runs may be another one with the same weights.
            if _equal(ids, self._ids) if table is None else module.weight is table.weight:
                return Place(self._path(module), "output", call)
        if not self.blocks or not self._takes_tokens(self.blocks[0]):
            raise CaptureError(f"The embedded tokens of {type(self.model).__name__} are not found.")
        return replace(self.blocks[0], side="input")

    def _takes_tokens(self, block: Place) -> bool:
        """Return True if a block takes embedded tokens: a whole model as one block may take ids instead."""
        return bool(block.module) or any(
            isinstance(t, Tensor) and t.is_floating_point() for t in self.given[0].named.values()
        )

    def _input(self, block: Place) -> Place:
        if self._takes_tokens(block):
            return replace(block, side="input")
        raise CaptureError(
            f"{type(self.model).__name__} has no blocks: its attention lies in no numbered entry of a module "
            "list, and in no layer of torch.nn. Take it whole, with scope 'model'."
        )

    def _embeddings_of_side(self) -> Place:
        given, model = self.given[0].named, self.model
        parts = [
            part for name in ("get_encoder", "get_decoder") if callable(part := getattr(model, name, None))
        ]
        tables = [embedding_of(part) for part in (model, *(part() for part in parts))]
        weights = {id(table.weight) for table in tables if table is not None}
        calls = [(module, call) for module, call, _ in self._embedded if id(module.weight) in weights]
        name = "input_ids" if self.side == "memory" else "decoder_input_ids"
        if name not in given or len(calls) != 1 + ("input_ids" in given):
            raise CaptureError(
                f"The embedded tokens of {name} are not found in {type(model).__name__}, so that it cannot "
                f"be taken as a function of them (side={self.side!r})."
            )
        module, call = calls[0 if self.side == "memory" else -1]
        return Place(self._path(module), "output", call)

    def _fixed_encoder(self) -> Place | None:
        """Return the encoder's output if the map is one of the decoder's tokens, and the encoder ran once."""
        if self.side != "queries" or not callable(part := getattr(self.model, "get_encoder", None)):
            return None
        encoder = part()
        return Place(self._path(encoder), "output") if self._calls.get(encoder) == 0 else None

    def _end(self, output: str) -> Place:
        """Return where a map to this output ends: where a module returns the hidden states, or the logits."""
        end: Any = self.model
        if output == "hidden" and isinstance(end, PreTrainedModel) and not self._returns_hidden:
            base: Any = end.base_model
            headed = base is end and end.get_output_embeddings() is not None
            # T5 with its head has no base model, and BART's decoder alone never calls it.
            if headed or base not in self._calls:
                base = end.get_decoder()  # it may have a head of its own
                base = base.get_decoder() if isinstance(base, PreTrainedModel) else base
            end = base
        return Place(self._path(end), "output")

    def _path(self, wanted: object) -> str:
        return next((name for name, module in self.model.named_modules() if module is wanted), "")

    def _site(
        self,
        scope: str,
        start: Place,
        end: Place,
        output: Output,
        first: int | None,
        last: int | None,
        words: str,
    ) -> Site:
        """Return a verified part; blocks before ``first`` are held fixed, None begins at the embeddings."""
        end_layer = len(self.layers) if last is None else last + 1
        own = None if first is None or start in self.blocks else self.blocks[first]
        before = [place for place in dict.fromkeys(self.blocks[: first or 0]) if place != own]
        running = {place.module for place in self.blocks[:end_layer] if place not in before}
        idle = [place.module for place in dict.fromkeys(self.blocks) if place.module not in running]
        # Places in the forward pass of the map, which has fewer calls inside of a block that is held fixed.
        fixed = sum(own is not None and place.module == own.module != start.module for place in before)
        begins, ends = replace(start, call=start.call - fixed), replace(end, call=end.call - fixed)
        if (encoder := self._fixed_encoder()) is not None:
            before.append(encoder)
            idle.append(encoder.module)
            begins = replace(start, call=0)
        runs = [_Run(one, start, end, before) for one in self.given]
        if not bool(output.of(runs[0].returned).isfinite().all()):
            with naming_weights(self.model):
                got, remedy = f"NaN or infinity from {end}", "Check the inputs."
                raise NonFiniteError("inputs", expected="finite outputs", got=got, remedy=remedy)
        self._check_cut(runs[0], output)
        x = torch.stack([one.tokens for one in runs])
        answers: dict[str, list[Any]] = {}
        for place, value in zip(before, runs[0].answers, strict=True):
            answers.setdefault(place.module, []).append(value)
        if output.unnamed:
            words = words.format(shape=tuple(output.of(runs[0].returned).shape))
        passage = Passage(begins, ends, output, answers, tuple(dict.fromkeys(idle)), words)
        inside = self.layers[first or 0 : end_layer]
        found, attention = self._map(passage, runs, x, depth=len(inside))
        causal = [layer.causal for layer in inside]
        return Site(
            name=f"{start} to {end}",
            layer=first or 0,
            head=None,
            scope=scope,
            causal=all(causal),
            masking="causal" if all(causal) else "partly causal" if any(causal) else "not causal",
            layout="",
            path="autodiff",
            path_reason=f"it reaches over several modules, with {attention or 'its own'} attention",
            x=x,
            map=found,
            norm=None,
            stored=self.given[0].stored,
        )

    def _check_cut(self, run: _Run, output: Output) -> None:
        """Raise _PassedBy if the output also depends on inputs that bypass the first point of the part."""
        try:
            embeddings = self._embeddings()
        except CaptureError:
            return
        if self.blocks and embeddings == replace(self.blocks[0], side="input"):  # images, audio: no table
            named = {
                name: moved_tokens(one) if isinstance(one, Tensor) and one.is_floating_point() else one
                for name, one in run.given.named.items()
                if "mask" not in name
            }
            changed = copy.copy(run)
            changed.given = replace(run.given, named={**run.given.named, **named})
            other = changed.moved(run.tokens)
        elif embeddings != run.start:
            with replaced(self.model, embeddings, moved_tokens):
                other = run.moved(run.tokens)
        else:
            return
        own, other = output.of(run.returned), output.of(other)
        if not relative_error(other, own) <= tolerance(lowest_epsilon(torch.float32)):
            raise _PassedBy(
                f"{type(self.model).__name__} is not captured from {run.start}: its output also depends on "
                "what enters the model past that point, such as by a residual around it. Write a module of "
                "its embedded tokens x, and measure it with hs.local_lipschitz(module, x)."
            )

    def _map(self, passage: Passage, runs: list[_Run], x: Tensor, depth: int) -> tuple[ModelMap, str | None]:
        dtype, device = computing_dtype(self.model), device_of(self.model)
        refused: list[str] = []
        for attention in _attentions(self.model, x.shape[1]):
            try:
                frozen = frozen_copy(self.model, dtype, device, idle=passage.idle, attention=attention)
                found = ModelMap(ModelPart(frozen, self.given[0].named, passage, x[0]))
                kept = {name: (t, t._version) for name, t in kept_tensors(frozen).items()}
                _verify(found, runs, x, depth)
                _refuse_state(found, [name for name, (t, version) in kept.items() if t._version != version])
            except HowsmoothError as error:
                refused.append(str(error))
            except Exception as error:  # a model may raise any error with an attention it does not know
                refused.append(f"With {attention or 'its own'} attention it raises {reason(error)}")
            else:
                return found, attention
        raise CaptureError(f"{type(self.model).__name__} {passage.words} is not captured. {refused[0]}")


def _experts(call: Call, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, ModelMap]]:
    names, (x, chosen, weights) = zip(*call.arguments().items(), strict=True)
    wanted, frozen = rows(first_tensor(call.output)), cast("Any", frozen_copy(call.module, dtype, x.device))
    passage = Passage(Place("", "input"), Place("", "output"), Output("tokens"), {}, (), "as one expert")
    total = torch.zeros_like(wanted)
    for i in range(frozen.num_experts):
        routed = (chosen == i).any(dim=-1)
        tokens, one = x[routed].to(dtype), copy.copy(frozen)  # with views of the weights of this expert
        one._parameters = {name: nn.Parameter(p[i : i + 1], False) for name, p in one._parameters.items()}
        one.num_experts, first = 1, chosen.new_zeros((len(tokens), 1))
        inputs = dict(zip(names, (tokens, first, tokens.new_ones(first.shape)), strict=True))
        part = ModelMap(ModelPart(one, inputs, passage, tokens))
        if part.n:
            total[routed] += part(tokens) * (weights * (chosen == i)).sum(dim=-1, keepdim=True)[routed]
        yield f"{call.name}.{i}", routed, part
    if not relative_error(total, wanted) <= tolerance(lowest_epsilon(torch.float32)):
        raise CaptureError("The output is not the weighted sum.")


def _within(name: str, outer: str) -> bool:
    return not outer or f"{name}.".startswith(f"{outer}.")


def _equal(ids: object, given: Tensor | None) -> bool:
    if not isinstance(ids, Tensor) or given is None or ids.numel() != given.numel():
        return False
    return bool((ids.flatten() == given.flatten()).all())


def _in_words(output: Output) -> str:
    if output.kind == "margin":
        return "margin, the largest logit minus the second"
    if output.unnamed:
        last = ", the last row" if output.last else ""
        return f"output{' as logits' if output.kind == 'logits' else ''}{last}, shape {{shape}}"
    name = {"hidden": "last hidden state"}.get(output.kind, output.kind)
    return f"{name} {_of_tokens(output.last)}"


def _of_tokens(last: bool) -> str:
    return "of the last token" if last else "of all tokens"


def _sequences_of(given: ModelCall) -> list[ModelCall]:
    if padding_of(given) is not None:
        raise ArgumentError(
            "inputs",
            expected="sequences without padding, for a part of a model that is longer than a layer",
            got="padding",
            remedy="Give one sequence at a time, with its real tokens.",
        )
    return one_by_one(given)


def _attentions(model: nn.Module, n: int) -> list[str | None]:
    """Return the implementations to try, None for the model's own; PyTorch's need memory of order n²."""
    if not isinstance(model, PreTrainedModel):
        return [None]
    own: list[str | None] = [None] if implementation(model) in ("sdpa", "eager") else ["sdpa"]
    if n < _LONG:
        return [*own, "eager"]
    register()
    return ["howsmooth", *own, "eager"]


class _Run:
    """A forward pass of the original model on one sequence, with the tensors at some chosen points."""

    def __init__(self, given: ModelCall, start: Place, end: Place, before: Sequence[Place] = ()) -> None:
        self.given = given
        self.start = start
        self.end = end
        self.answers: list[Any] = []
        found: list[Any] = []
        with ExitStack() as stack:
            for place in before:
                stack.enter_context(observed(given.model, place, lambda v: self.answers.append(copied(v))))
            stack.enter_context(observed(given.model, start, lambda value: found.append(copied(value))))
            self.returned = self._ended()
        if not found or found[0] is None:
            raise CaptureError(f"The forward pass did not reach {start}.")
        self.tokens = rows(first_tensor(found[0]))

    def moved(self, x: Tensor) -> Any:
        """Return the tensor at the last point if the first one has the tokens ``x`` (n, d)."""
        with replaced(self.given.model, self.start, x):
            return self._ended()

    def _ended(self) -> Any:
        found: list[Any] = []

        def reached(value: Any) -> None:
            found.append(copied(value))
            raise StopForward

        with observed(self.given.model, self.end, reached):
            run_once(self.given)
        if not found:
            raise CaptureError(f"The forward pass did not reach {self.end}.")
        return found[0]


def _refuse_state(found: ModelMap, written: list[str]) -> None:
    """Refuse a model that reads tensors it overwrites: each run spoils the derivative of the one before."""
    if not written:
        return
    try:
        with torch.enable_grad():
            jacobian = AutodiffJacobian(found, found.own.x[None])
            jacobian.adjoint_product(jacobian.product(found.own.x[None]))
    except DerivativeError as error:
        raise CaptureError(
            f"It writes into tensors that it keeps ({', '.join(written[:4])}) and reads them, as a cache of "
            "keys and values, so that it has a state and no derivative. Switch this off for the measurement."
        ) from error


def _verify(found: ModelMap, runs: list[_Run], x: Tensor, depth: int) -> None:
    """Compare a map with the model; errors of ``depth`` layers grow as a move of x by one epsilon does."""
    # A margin may be close to zero, so that its logits are compared.
    output = (
        replace(found.own.passage.output, kind="logits")
        if found.own.passage.output.kind == "margin"
        else None
    )
    plain = found if output is None else found.reading(output)
    of = plain.own.passage.output.of
    with notice_downcasts(x.dtype) as downcasts:
        own = [of(one.returned) for one in runs]
        moved = moved_tokens(x)
        wanted = [of(one.moved(tokens)) for one, tokens in zip(runs, moved, strict=True)]
    eps = lowest_epsilon(x.dtype, downcast=downcasts.seen)
    grown = max(
        relative_error(plain(tokens), plain(at))
        for at in (x[0], moved[0])
        for tokens in itertools.islice(moved_by_rounding(at), _SHIFTS)
    )
    allowed = (1 + depth) * (tolerance(eps) + 16.0 * grown * eps / lowest_epsilon(x.dtype))
    for what, tokens, values in (("", x, own), (" on other tokens", moved, wanted)):
        for i, (one, want) in enumerate(zip(tokens, values, strict=True)):
            got = plain(one)
            if got.shape != want.shape:
                raise CaptureError(f"The map gives {tuple(got.shape)}, the model {tuple(want.shape)}.")
            error = relative_error(got, want)
            if not error <= allowed:
                why = (
                    "; other inputs, positions or masks differ between sequences: give one at a time"
                    if i
                    else ""
                )
                raise CaptureError(
                    f"The map differs from the model's own output{what} by {error:.1e} relative, where "
                    f"rounding explains {allowed:.1e}{why}."
                )
