"""Decides which calls run by captured graphs, and runs their forwards: eagerly where anything is unusual.

A graph is replayed once its logits were those of the eager forward, at two lengths. Graph and eager forward run on the
same memory.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import sqrt
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..blocks.arguments import int_of_at_least
from ..errors import CacheArgumentError, CacheBusyError
from ..locks import new_lock
from ..model.fingerprint import Fingerprint
from ..model.layers import cache_layers, sees_all
from ..model.support import attention_of
from ..model.trial import distance, layers_after_a_token
from . import memory
from .graphs import EXPERTS, FAILURES, NUM_CHECKS, TOKENS, Arena, Graph, Model, failed, together
from .memory import Columns, Streams
from .rows import Rows

NOT_WORTH_IT = "a capture takes more time than it would save"
NOT_FASTER = "a replay took as long as the eager forward"
CAPTURES = ("auto", False, "dry")
_ATTENTIONS = ("sdpa", "eager")
_TOLERANCE = 1e-4  # allowed difference in float32, as a share of the largest logit
_TOLERANCE_IN_EPS = 4.0  # allowed difference of one layer below float32, in eps of the dtype
_MOST_COMING = 1024  # columns that a room is made for, beyond those that rows have
_PLAIN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "cache_position", "logits_to_keep"}
_ON = {"use_cache", "return_dict"}  # arguments that may be true
_attaching = new_lock()  # two caches of a model may be built at once


def require_capture(capture: Any) -> None:
    """Raise CacheArgumentError if `capture` is neither 'auto', False nor 'dry'."""
    if not any(capture is each or (isinstance(each, str) and capture == each) for each in CAPTURES):
        raise CacheArgumentError(f"capture is {capture!r}; give 'auto', False or 'dry'")


class CapturedForward:
    """`CapturedForward` stands in a model's `__dict__` for `forward`, and is copied and pickled with the model.

    Forwards of static rows are run by the call of these rows; all other forwards are passed on.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.replaced = model.__dict__.get("forward")  # that somebody else had put there; None: the class's own is used
        forward = type(model).forward
        self.__name__, self.__qualname__, self.__doc__ = forward.__name__, forward.__qualname__, forward.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows = kwargs.get("past_key_values")
        if type(rows) is Rows and rows.captured is not None and not args and not torch.compiler.is_compiling():
            return rows.captured.forward(self.__wrapped__, kwargs)
        return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        forward: Callable[..., Any] = self.replaced
        return type(self.model).forward.__get__(self.model) if forward is None else forward


def attach_forward(model: Any) -> None:
    """Put a `CapturedForward` on a model, unless it has one."""
    with _attaching:
        if not isinstance(model.__dict__.get("forward"), CapturedForward):
            model.forward = CapturedForward(model)


def detach_forward(model: Any) -> None:
    """Take the `CapturedForward` off a model, and put back what was there."""
    with _attaching:
        attached = model.__dict__.get("forward")
        if not isinstance(attached, CapturedForward):
            return
        if attached.replaced is None:
            del model.forward
        else:
            model.forward = attached.replaced


class Said:
    """`Said` tells how the forwards of one call ran."""

    def __init__(self, why_not: str = "") -> None:
        self.num_forwards = self.num_captured = 0  # all, and those that were replays of a graph
        self.num_compared = 0  # that ran both by a graph and eagerly
        self.why_not = why_not  # why the last forward that was not captured was not

    def __str__(self) -> str:
        counted = f"{self.num_captured} of {self.num_forwards} forwards were captured" if self.num_forwards else ""
        compared = f"{self.num_compared} ran eagerly as well, to compare" if self.num_compared else ""
        return "; ".join(filter(None, (counted, compared, self.why_not)))


class CapturedCall:
    """`CapturedCall` runs the forwards of one call: by graphs where it can, while the call's rows lie in the arena.

    It has the arena from `begin` until it is closed. A shape is captured when that is expected to pay, or `always`.
    """

    def __init__(
        self, rows: Rows, model: Model, arena: Arena, said: Said, may_change: Callable[[], bool], *, always: bool
    ) -> None:
        self._facts, self._may_change = model.look(), may_change
        self._rows, self._model, self._arena, self._always, self.said = rows, model, arena, always, said
        self._max_columns = rows.state.limits.max_columns
        self._memory: list[Streams] | None = None

    def begin(self, num_rows: int, start: int, stop: int) -> str:
        """Take the arena for a first forward of the columns `[start, stop)`; return why the call is not captured.

        Where no capture would pay, the call's forwards are counted, and its rows may share columns.
        """
        arena, experts = self._arena, self._model.experts()
        room = arena.room(num_rows, self._room_wanted(stop, 1))
        if not arena.fits(arena.shapes, num_rows, room):
            return too_large(num_rows, room)
        if not arena.check_out(self, self._rows.state.digest):
            return "another call has the arena"
        wanted = {1: max(0, int(min(self._max_columns, room)) - stop)}  # tokens of a forward -> number of forwards
        if stop - start <= TOKENS[-1]:
            tokens = next(each for each in TOKENS if stop - start <= each)
            wanted[tokens] = wanted.get(tokens, 0) + 1
        graphs = [(self._graph(num_rows, tokens, room, experts), number) for tokens, number in wanted.items()]
        if self._always or any(number and self._pays(graph, number) for graph, number in graphs):
            return ""
        for graph, number in graphs:
            graph.num_wanted += number
        arena.check_in(self)
        return next((graph.why_not for graph, _ in graphs if graph.why_not), NOT_WORTH_IT)

    def _graph(self, num_rows: int, tokens: int, room: int, experts: object) -> Graph:
        return self._arena.graph(num_rows, tokens, room, self._model.attention, experts)

    def _pays(self, graph: Graph, num_coming: int) -> bool:
        return self._always or (not graph.why_not and self._arena.pays(graph, num_coming))

    def _room_wanted(self, n: int, tokens: int) -> int:
        """Return the columns that rows need room for, of which there are `n`, in forwards of so many tokens."""
        return max(n + tokens, int(min(self._max_columns + 1, n + tokens + _MOST_COMING)))

    def forward(self, eager: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Run a forward of the rows by a graph where there may be one, else by the eager forward."""
        said, rows, model = self.said, self._rows, self._model
        said.num_forwards += 1
        why = why_eager(arguments, rows)
        num = 0 if why else arguments["input_ids"].shape[1]
        tokens = next((each for each in TOKENS if num <= each), None)
        if tokens is None:
            return eager(**arguments)
        if not why and num != tokens and not model.fills_up:
            why = "a prompt that is filled up with tokens may give the others other experts"
        if not why and self._may_change():
            self._facts = model.look()
        facts = {**self._facts, EXPERTS: model.experts()}  # `generate` sets others for steps than for prompts
        graph = None if why else self._placed(tokens, facts)
        if graph is None or graph.captured is None:
            said.why_not = why or said.why_not
            return eager(**arguments)
        if facts != graph.look:
            changed = next((name for name, value in facts.items() if graph.look.get(name) != value), "the model")
            said.why_not = f"{changed} changed after the capture"
            return eager(**arguments)
        pads = [prompt.pad for prompt in rows.prompts]
        if graph.is_to_check(rows.n):
            return self._check(graph, eager, arguments, pads)
        output = graph.captured.run(arguments["input_ids"], arguments["position_ids"], pads, rows.n)
        for layer in rows.layers:
            if layer.held is not None:
                layer.n += num
        output.past_key_values = rows
        said.num_captured += 1
        return output

    def _placed(self, tokens: int, facts: Mapping[str, object]) -> Graph | None:
        """Return the graph of a forward of so many tokens, with the rows in its memory; None: `said` has the reason."""
        rows, arena, held, n, said = self._rows, self._arena, self._memory, self._rows.n, self.said
        lies_there = held is not None and rows.all.memory is held
        room = held[0].tensor.shape[3] if lies_there and held is not None else 0
        if n + tokens > room:
            lies_there, room = False, arena.room(rows.num_rows, self._room_wanted(n, tokens))
        graph = self._graph(rows.num_rows, tokens, room, facts.get(EXPERTS))
        if graph.why_not:
            said.why_not = graph.why_not
            return None
        if said.num_forwards == 1 and graph.captured is not None and facts != graph.look:
            graph.drop()  # changed since another call; within one call it may change back
        num_coming = int(min(self._max_columns, room)) - n if tokens == 1 else 1
        if not self._pays(graph, num_coming):
            graph.num_wanted += 1
            said.why_not = NOT_WORTH_IT
            return None
        if not lies_there and not self._enter(room):
            return None
        if graph.captured is None:
            assert self._memory is not None
            arena.capture(graph, self._model, self._memory, tokens, facts)
            said.why_not = graph.why_not
        return graph

    def _enter(self, room: int) -> bool:
        """Let the rows lie in the arena, with room for so many columns; return whether they do."""
        rows, n, arena, said = self._rows, self._rows.n, self._arena, self.said
        if not rows.all.memory:
            said.why_not = "which layers keep what is known after the first forward"
            return False
        if rows.shared is not None or any(layer.n != n for layer in rows.layers if layer.held is not None):
            said.why_not = "rows share columns, or layers have skipped some"
            return False
        if arena.holds(rows.all.memory):
            self._move_out()  # the new memory begins at the same place
        source = rows.all.memory
        made = self._memory = arena.memory(together(memory.shapes_of_rows(source)), rows.num_rows, room)
        if made is None:
            said.why_not = too_large(rows.num_rows, room)
            return False
        for row in range(rows.num_rows):
            memory.copy_columns(Columns(source, row, 0, n), made, row, 0)
        rows.take(made, n)
        return True

    def _move_out(self) -> None:
        """Let the rows lie in memory of their own."""
        rows = self._rows
        index = torch.arange(rows.num_rows, device="cpu")
        rows.take(rows.all.selected(index, rows.n, max(1, rows.n)), rows.n)

    def _check(self, graph: Graph, eager: Callable[..., Any], arguments: Mapping[str, Any], pads: Sequence[int]) -> Any:
        """Run the graph, then the eager forward, which writes the same columns again; compare logits and times."""
        rows, ids, logits, n = self._rows, arguments["input_ids"], None, self._rows.n
        times = [self._now(ids.device)]
        assert graph.captured is not None
        try:
            logits = graph.captured.run(ids, arguments["position_ids"], pads, n).logits
        except FAILURES as error:
            graph.why_not = failed(error)
        times.append(self._now(ids.device))
        self.said.num_compared += 1
        output = eager(**arguments)
        times.append(self._now(ids.device))
        extra = [name for name in output if name not in ("logits", "past_key_values")]
        if extra:
            graph.why_not = f"the model returns {', '.join(extra)} beside logits"
        elif logits is not None:
            wanted = output.logits[:, -1:]
            apart, most = distance(wanted.float(), logits.float()), tolerance(wanted.dtype, rows)
            if not apart <= most:
                graph.why_not = f"a graph's logits differ by {apart:.1e} of their scale from the eager forward's"
            graph.checked.append(n)
            self._arena.note_saved(graph, times[2] - times[1] - (times[1] - times[0]))
            if not self._always and graph.saved_seconds <= 0 and len(graph.checked) >= NUM_CHECKS:
                graph.why_not = NOT_FASTER
        if graph.why_not:
            graph.captured = None
            self.said.why_not = graph.why_not
        return output

    def _now(self, device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter()

    def close(self) -> None:
        """End the call: rows that lie in the arena leave it, and another call may have it."""
        rows = self._rows
        self._memory = rows.captured = None
        try:
            if rows.is_open and self._arena.holds(rows.all.memory):
                rows.is_whole = rows.is_whole and not rows.is_edited  # their memory is another one from here on
                try:
                    self._move_out()
                except torch.OutOfMemoryError:
                    if rows.escaped:
                        self._arena.drop()  # the memory belongs to whoever holds the rows from here on
                    else:
                        rows.reset()
        finally:
            self._arena.check_in(self)


def too_large(num_rows: int, room: int) -> str:
    """Say that rows are not captured for want of memory."""
    return f"{num_rows} rows of {room} columns are more than the arena may take"


def why_eager(arguments: Mapping[str, Any], rows: Rows) -> str:
    """Return why a forward with these arguments is not captured; "": it may be."""
    if rows.why_bypassed is not None:
        return rows.why_bypassed
    for name, value in arguments.items():
        if value is None or name in _PLAIN or (name in _ON and value is True):
            continue
        if value is False and name not in _ON:
            continue
        return f"the forward was passed {name}"
    ids, positions, mask = map(arguments.get, ("input_ids", "position_ids", "attention_mask"))
    kept = arguments.get("logits_to_keep")
    num_rows, n = rows.num_rows, rows.n
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] != num_rows:
        return "the forward was not passed ids for each row"
    if not isinstance(positions, Tensor) or positions.shape not in ((num_rows, ids.shape[1]), (1, ids.shape[1])):
        return "the forward was passed no positions"
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (num_rows, n + ids.shape[1])):
        return "the forward was passed a mask of another form"
    if not (isinstance(kept, int) and kept == 1) and not (ids.shape[1] == 1 and (kept is None or kept is False)):
        return "more than the last logits are asked for"
    if torch.is_grad_enabled():
        return "gradients are on"
    return ""


def tolerance(dtype: torch.dtype, rows: Rows) -> float:
    """Return how far logits of a graph may be from the eager forward's, as a share of their scale."""
    held = [tensor.dtype for tensor, _ in rows.all.memory]
    eps = max(torch.finfo(each).eps for each in (dtype, *held))
    if eps <= torch.finfo(torch.float32).eps:
        return _TOLERANCE
    return _TOLERANCE_IN_EPS * eps * sqrt(max(1, len(rows.layers)))  # each layer rounds anew


class Capturing:
    """`Capturing` lets calls of one cache run on static rows.

    Where `capture` is "dry", their forwards call the model in place of a graph, on any device.
    """

    def __init__(self, fingerprint: Fingerprint, capture: Any, arena: Arena, *, takes_positions: bool) -> None:
        self.capture, self._fingerprint, self._arena = capture, fingerprint, arena
        self._takes_positions = takes_positions
        self._digest, self._why = b"", ""  # fingerprint of the model; why it is not captured
        self._model: Model | None = None  # what is captured

    def attach(self) -> bool:
        """Attach to the model's forward, if calls may be captured on the device where the model is now; return that."""
        capture, model = self.capture, self._fingerprint.model
        may_be_captured = bool(capture == "dry" or (capture == "auto" and model.device.type == "cuda"))
        if may_be_captured:
            attach_forward(model)
        return may_be_captured

    def begin(self, rows: Rows, num_rows: int, start: int, stop: int, unusual: str | None) -> Said:
        """Have rows run by graphs from their next forward on, of the columns `[start, stop)`, if they may be.

        Return what tells how the call's forwards run. Where it is `unusual`, that says why they are not captured.
        """
        state = rows.state
        why, model = self._of_model(state.digest)
        said = Said(why or unusual or self._unusual(rows))
        if said.why_not or model is None:
            return said

        def may_change() -> bool:
            return state.calls_back or self._fingerprint.may_change_in_a_forward()

        call = CapturedCall(rows, model, self._arena, said, may_change, always=self.capture == "dry")
        said.why_not = call.begin(num_rows, start, stop)
        if not said.why_not:
            rows.captured = call
        return said

    def _unusual(self, rows: Rows) -> str:
        if not rows.in_generate:
            return "the forwards are a loop of one's own"
        if rows.records_drafts:
            return "drafts are verified, and ask for several logits"
        if rows.shared is not None:
            return "rows share columns"
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        return ""

    def _of_model(self, digest: bytes) -> tuple[str, Model | None]:
        """Return why forwards of the model, as it is now, are not captured; or "", and what is captured."""
        if self._digest != digest or not digest:
            self._why, self._model = self.why_not_the_model(), None
            if not self._why:
                model: Any = self._fingerprint.model
                attached = model.__dict__.get("forward")
                forward = attached.__wrapped__ if isinstance(attached, CapturedForward) else model.forward
                self._model = Model(model, forward)
            self._digest = digest
        return self._why, self._model

    def why_not_the_model(self) -> str:
        """Return why forwards of the model, as it is now, are captured on no device; "": they may be captured."""
        model, fingerprint = self._fingerprint.model, self._fingerprint
        layers = cache_layers(model)
        if not all(map(sees_all, layers)):
            return "some layers do not see all tokens"
        if not self._takes_positions:
            return "the model takes no position_ids"
        if (attention := attention_of(model)) not in _ATTENTIONS:
            return f"the attention {attention!r} is neither 'sdpa' nor 'eager'"
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            return f"the model is on {len(devices)} devices"
        if any(_offloads(getattr(module, "_hf_hook", None)) for module in model.modules()):
            return "weights are offloaded"
        if fingerprint.rank_groups:
            return "other processes share the model"
        if fingerprint.rope.depends_on_length:
            return "rotary frequencies depend on length"
        if any(map(_is_compiled, model.modules())):
            return "the model is compiled"
        fingerprint.digest()  # as the model is now
        if (others := fingerprint.foreign_code) is not None:
            return f"code of others runs in the forward: {others}"
        if (own := fingerprint.own_forward) is not None and not fingerprint.trusts_hooks:
            return f"a graph runs no Python of {own} (trust_hooks=True says that it does the same in each step)"
        return ""

    def warm_up(self, rows: int, tokens: int) -> str:
        """Capture the graphs of so many rows of at most so many tokens; see `PagedPrefixCache.warm_up`."""
        num_rows = int_of_at_least("rows", rows, 1, "row")
        num_tokens = int_of_at_least("tokens", tokens, 2, "tokens, of prompt and answer")
        fingerprint, arena = self._fingerprint, self._arena
        model = fingerprint.model
        if not self.attach():
            return "the cache was built with capture=False" if not self.capture else "the model is not on a CUDA device"
        most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if isinstance(most, int) and num_tokens > most:
            raise CacheArgumentError(f"tokens is {num_tokens}, and the model has {most} positions; give at most {most}")
        why, captured = self._of_model(digest := fingerprint.digest())
        if why or captured is None:
            return why
        holder = Said()
        if not arena.check_out(holder, digest):
            raise CacheBusyError("another call runs on static rows; warm up before there are calls")
        try:
            held = [
                memory.Streams(tensor.unsqueeze(0), ((index, name),))
                for index, layer in enumerate(layers_after_a_token(model))
                for name, tensor in (("key", layer.keys), ("value", layer.values))
                if tensor is not None
            ]
            room = arena.room(num_rows, num_tokens)
            made = arena.memory(together(memory.shapes_of_rows(held)), num_rows, room)
            if made is None:
                return too_large(num_rows, room)
            facts, reasons = captured.look(), list[str]()
            for number in TOKENS[::-1]:
                graph = arena.graph(num_rows, number, room, captured.attention, facts.get(EXPERTS))
                if number <= num_tokens and graph.captured is None and not graph.why_not:
                    arena.capture(graph, captured, made, number, facts)
                reasons += [graph.why_not] if graph.why_not else []
            return "; ".join(dict.fromkeys(reasons))
        finally:
            arena.check_in(holder)

    def give_way(self) -> None:
        """Give back the arena's memory when memory is short, unless a call runs in it."""
        with suppress(CacheBusyError):
            self.release()

    def release(self) -> None:
        """Give back the arena's memory and all graphs; raise CacheBusyError if a call runs on static rows."""
        holder = Said()
        if not self._arena.check_out(holder, b""):  # no model's graphs: those that there are are forgotten
            raise CacheBusyError("a call runs on static rows; release them when it has ended")
        try:
            self._arena.drop()
        finally:
            self._arena.check_in(holder)


def _is_compiled(module: Any) -> bool:
    forward = module.__dict__.get("forward")
    inside = forward.replaced if isinstance(forward, CapturedForward) else forward
    is_inside = hasattr(inside, "_torchdynamo_orig_callable")
    return is_inside or type(module).__name__ == "OptimizedModule" or bool(module._compiled_call_impl)


def _offloads(hook: Any) -> bool:
    """Return whether a hook of accelerate brings weights from elsewhere."""
    parts: Sequence[Any] = getattr(hook, "hooks", None) or (hook,)
    return any(getattr(each, "offload", False) for each in parts)
