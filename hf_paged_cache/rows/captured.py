"""Runs the forwards of one call by captured graphs, and by the model's eager forward where anything is unusual.

A graph is replayed once its logits were those of the eager forward, at two lengths. Graph and eager forward run on the
same memory.
"""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..model.trial import distance
from . import memory
from .graphs import EXPERTS, FAILURES, TOKENS, Model, failed
from .memory import Streams
from .rows import Rows
from .static import Arena, Graph, together

NOT_WORTH_IT = "a capture takes more time than it would save"

_TOLERANCE = 1e-4  # allowed difference in float32, as a share of the largest logit
_TOLERANCE_IN_EPS = 4.0  # allowed difference of one layer below float32, in eps of the dtype
_MOST_COMING = 1024  # columns that a room is made for, beyond those that rows have
_PLAIN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "cache_position", "logits_to_keep"}
_ON = {"use_cache", "return_dict"}  # arguments that may be true


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
    """`CapturedCall` runs the forwards of one call, whose rows are static as long as they can be.

    It has the arena from `begin` until it is closed.

    Args:
        always: capture whatever a capture takes.
        first: first column, and the column after the last one, of the next forward.
        max_columns: most columns that rows may have; infinite where nobody knows.
        may_change: whether anybody could have changed the model since the last forward.
    """

    def __init__(
        self,
        rows: Rows,
        model: Model,
        arena: Arena,
        *,
        always: bool,
        first: tuple[int, int],
        max_columns: float,
        may_change: Callable[[], bool],
    ) -> None:
        self._facts, self._may_change = model.look(), may_change
        self._rows, self._model, self._arena = rows, model, arena
        self._always, self._first, self._max_columns, self.said = always, first, max_columns, Said()
        self._memory: list[Streams] | None = None

    def begin(self, num_rows: int, digest: bytes) -> str:
        """Take the arena for so many rows of a model with this fingerprint; return why the call is not captured.

        Where a capture would not pay, the call's forwards are counted as wanted.
        """
        (start, stop), arena = self._first, self._arena
        room = arena.room(num_rows, self._room_wanted(stop, 1))
        if not arena.fits(arena.shapes, num_rows, room):
            return too_large(num_rows, room)
        if not arena.check_out(self, digest):
            return "another call has the arena"
        if self._always:
            return ""
        steps = int(min(self._max_columns, room)) - stop
        wanted = [(self._graph(num_rows, 1, room, self._model.experts()), steps)]
        tokens = next((each for each in TOKENS if stop - start <= each), None)
        if tokens is not None:
            wanted.append((self._graph(num_rows, tokens, room, self._model.experts()), 1))
        if any(number and arena.pays(graph, number) for graph, number in wanted):
            return ""
        for graph, number in wanted:
            graph.num_wanted += number
        arena.check_in(self)
        return NOT_WORTH_IT

    def _graph(self, num_rows: int, tokens: int, room: int, experts: object) -> Graph:
        return self._arena.graph(num_rows, tokens, room, self._model.attention, experts)

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
        if not self._always and not arena.pays(graph, int(min(self._max_columns, room)) - n if tokens == 1 else 1):
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
        rows, n, source = self._rows, self._rows.n, self._rows.all.memory
        if not source:
            self.said.why_not = "which layers keep what is known after the first forward"
            return False
        if rows.shared is not None or any(layer.n != n for layer in rows.layers if layer.held is not None):
            self.said.why_not = "rows share columns, or layers have skipped some"
            return False
        shapes = together(memory.shapes_of_rows(source))
        if self._arena.holds(source) and self._arena.fits(shapes, rows.num_rows, room):
            source = self._moved_out()  # the new memory begins at the same place
        made = self._take(shapes, rows.num_rows, room)
        if made is None:
            return False
        memory.copy_rows(source, made, n)
        rows.take(made, n)
        return True

    def _moved_out(self) -> list[Streams]:
        """Let the rows lie in memory of their own; return it."""
        rows = self._rows
        index = torch.arange(rows.num_rows, device="cpu")
        rows.take(rows.all.selected(index, rows.n, max(1, rows.n)), rows.n)
        return rows.all.memory

    def make(self, shapes: Sequence[memory.Shape], num_rows: int, wanted: int) -> list[Streams]:
        """Make zeroed memory for rows that begin: in the arena, or where there is no room, of the columns wanted."""
        start, stop = self._first
        tokens = next((each for each in TOKENS if stop - start <= each), 0)
        room = self._arena.room(num_rows, max(start + tokens, self._room_wanted(stop, 1)))
        made = self._take(together(shapes), num_rows, room) if shapes else None
        return memory.make(shapes, num_rows, wanted) if made is None else made

    def _take(self, shapes: Sequence[memory.Shape], num_rows: int, room: int) -> list[Streams] | None:
        """Return the arena's memory of so many rows. None: no room."""
        self._memory = self._arena.memory(shapes, num_rows, room)
        if self._memory is None:
            self.said.why_not = too_large(num_rows, room)
        return self._memory

    def _check(self, graph: Graph, eager: Callable[..., Any], arguments: Mapping[str, Any], pads: Sequence[int]) -> Any:
        """Run the graph, then the eager forward, which writes the same columns again; compare logits and times."""
        rows, ids, logits, times = self._rows, arguments["input_ids"], None, [self._now()]
        n = rows.n
        assert graph.captured is not None
        try:
            logits = graph.captured.run(ids, arguments["position_ids"], pads, n).logits
        except FAILURES as error:
            graph.why_not = failed(error)
        times.append(self._now())
        self.said.num_compared += 1
        output = eager(**arguments)
        times.append(self._now())
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
        if graph.why_not:
            graph.captured = None
            self.said.why_not = graph.why_not
        return output

    def _now(self) -> float:
        if self._rows.all.memory[0].tensor.device.type == "cuda":
            torch.cuda.synchronize(self._rows.all.memory[0].tensor.device)
        return perf_counter()

    def close(self) -> None:
        """End the call: rows that lie in the arena leave it, and another call may have it."""
        rows = self._rows
        self._memory = rows.captured = None
        try:
            if rows.is_open and self._arena.holds(rows.all.memory):
                rows.is_whole = rows.is_whole and not rows.is_edited  # their memory is another one from here on
                try:
                    self._moved_out()
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
