"""Decides which calls run on static rows, or says why not; attaches to a model's forward what runs them."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ..blocks.arguments import int_of_at_least
from ..errors import CacheArgumentError, CacheBusyError
from ..locks import new_lock
from ..model.fingerprint import Fingerprint
from ..model.layers import cache_layers, sees_all
from ..model.support import attention_of
from ..model.trial import layers_after_a_token
from ..rows import memory
from ..rows.captured import CapturedCall, Said, too_large
from ..rows.graphs import EXPERTS, TOKENS, Model
from ..rows.request import CallState
from ..rows.rows import Rows
from ..rows.static import Arena, together

CAPTURES = ("auto", False, "dry")
_ATTENTIONS = ("sdpa", "eager")
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


class Capturing:
    """`Capturing` lets calls of one cache run on static rows.

    Args:
        fingerprint: the model, and what its keys and values depend on.
        capture: "auto", False, or "dry": static rows whose forwards call the model in place of a graph, on any device.
        arena: memory of static rows of the store.
        takes_positions: whether the model's forward has `position_ids`.
    """

    def __init__(self, fingerprint: Fingerprint, capture: Any, arena: Arena, *, takes_positions: bool) -> None:
        self.capture, self._fingerprint, self._arena = capture, fingerprint, arena
        self._takes_positions = takes_positions
        self._digest, self._why = b"", ""  # fingerprint of the model; why it is not captured
        self._model: Model | None = None  # what is captured

    def attach(self) -> bool:
        """Attach to the model's forward, if calls may be captured on the device where the model is now; return that."""
        capture, model = self.capture, self._fingerprint.model
        may_be_captured = capture == "dry" or (capture == "auto" and model.device.type == "cuda")
        if may_be_captured:
            attach_forward(model)
        return may_be_captured

    def begin(
        self, rows: Rows, num_rows: int, start: int, stop: int, *, max_columns: float, unusual: str | None
    ) -> Said:
        """Have rows run by graphs from their next forward on, of the columns `[start, stop)`, if they may be.

        Return what tells how the call's forwards run. Rows of graphs have the arena until the call is closed.

        Args:
            max_columns: most columns that the rows will have.
            unusual: why this call is not captured; None: nothing is unusual about it.
        """
        digest, always = rows.state.digest, self.capture == "dry"
        why, model = self._of_model(digest)
        why = why or unusual or self._unusual(rows, max_columns, always=always)
        if why or model is None:
            return Said(why)
        call = CapturedCall(
            rows,
            model,
            self._arena,
            always=always,
            first=(start, stop),
            max_columns=max_columns,
            may_change=partial(self._may_change, rows.state),
        )
        call.said.why_not = call.begin(num_rows, digest)
        if not call.said.why_not:
            rows.captured = call
        return call.said

    def _may_change(self, state: CallState) -> bool:
        return state.calls_back or self._fingerprint.may_change_in_a_forward()

    def _unusual(self, rows: Rows, max_columns: float, *, always: bool) -> str:
        if not rows.in_generate:
            return "the forwards are a loop of one's own"
        if rows.records_drafts:
            return "drafts are verified, and ask for several logits"
        if rows.shared is not None:
            return "rows share columns"
        if not rows.kinds.see_all:
            return "some layers do not see all tokens"
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        if not always and math.isinf(max_columns):
            return "nobody knows how many tokens come"
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

    def give_way(self, rows: Rows) -> None:
        """Give back the arena's memory when memory is short and rows are given up, unless another call runs in it."""
        if rows.captured is not None:
            rows.captured.close()
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
