"""Owns what layers carry of a call's rows, and copies of it at the places where states are kept.

What layers carry are the last inputs of convolutions, and recurrent states. The model writes states in place. So the
states of the rows count only between forwards, and no longer count after a forward has died.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ..kv.states import (
    StateKey,
    StateLayers,
    States,
    clear_states,
    copied,
    held_states,
    put_states,
    read_states,
    row_of,
    select_rows,
    without_past,
)
from ..kv.tensors import to_device
from .layers import LayerKinds


class RowStates:
    """`RowStates` has the states of one call's rows, which lie in these layers, by index."""

    def __init__(self, layers: StateLayers, kinds: LayerKinds) -> None:
        self._layers, self._align, self.clamps_one_token = layers, kinds.align, kinds.clamps_one_token
        self.most_inside = kinds.most_inside
        # For each row, number of tokens -> what layers carried after these, where that is to be kept with its blocks.
        self.taken: list[dict[int, States]] = []
        self.next_place = 0  # first number of columns after which the states of some row may be taken
        # Inside the running forward: number of columns behind a place, row, and its number of tokens up to there.
        self._inside: list[tuple[int, int, int]] = []
        self._recorded: dict[StateKey, Tensor] = {}  # what convolutions carried at these places: tensors [places, ...]

    def num_needed(self, num_columns: int, *, is_padding: bool) -> int:
        """Return how many of a prompt's last columns run in the forward over all rows.

        Where a row has nothing but padding there, it is two: of one column, models do not look whether it is padding.
        """
        return 2 if num_columns > 1 and (is_padding or self.clamps_one_token) else 1

    @property
    def num_bytes(self) -> int:
        """Bytes of what layers carry, and of the states that were taken."""
        held = [self.read(), *(states for taken in self.taken for states in taken.values())]
        return sum(each.nbytes for states in held for each in states.values())

    def read(self) -> dict[StateKey, Tensor]:
        """Return the states that the layers carry now, uncopied: the next forward overwrites them."""
        return read_states(self._layers)

    def put(self, states: States) -> None:
        """Let the rows resume from these states, which nobody else has; without any, from no state."""
        put_states(self._layers, states)

    def begin(self, num_rows: int) -> None:
        self.taken, self.next_place = [{} for _ in range(num_rows)], 0

    def record(self, key: StateKey, inputs: Tensor, pads: Sequence[int], start: int, stop: int) -> None:
        """Record what a convolution carries inside a forward of the columns `[start, stop)`: its last inputs there.

        Shapes: inputs [R, ..., columns up to `stop`].
        """
        if not self._recorded:
            inside, align = list[tuple[int, int, int]](), self._align
            for row, pad in enumerate(pads):
                first = max(0, start - pad) // align * align + align
                inside += [(stop - pad - place, row, place) for place in range(first, stop - pad, align)]
            self._inside = sorted(inside)[: self.most_inside]  # those nearest to the prompts' ends
        if not self._inside:
            return
        width = self._layers[key.layer_idx].conv_kernel_size[key.state_idx] or 0
        with suppress(torch.OutOfMemoryError):  # without one of them, none is taken
            rows = to_device([row for _, row, _ in self._inside], inputs.device)
            ends = to_device([-1 - num_behind for num_behind, _, _ in self._inside], inputs.device)
            windows = torch.nn.functional.pad(inputs.detach(), (width, 0)).unfold(-1, width, 1)
            self._recorded[key] = windows.movedim(-2, 1)[rows, ends]

    def take(self, pads: Sequence[int], n: int, *, is_step: bool) -> None:
        """Take the states of rows that are at a place where states are kept.

        After a step, they replace the states that were taken of the same row earlier.
        """
        align = self._align
        self.next_place = min((n + align - (n - pad) % align for pad in pads), default=0)
        recorded, self._recorded = self._recorded, {}
        if recorded and recorded.keys() == self.read().keys():
            for number, (_, row, num_tokens) in enumerate(self._inside):
                self.taken[row][num_tokens] = row_of(recorded, number)
        at = [row for row, pad in enumerate(pads) if n > pad and (n - pad) % align == 0]
        if not at or (is_step and self.clamps_one_token):
            return
        held = self.read()
        with suppress(torch.OutOfMemoryError):  # without them, a prompt that would resume there is computed
            for row in at:
                states = copied(row_of(held, row))
                if is_step:
                    self.taken[row].clear()
                self.taken[row][n - pads[row]] = states

    def select(self, index: Tensor) -> None:
        """Let row `i` continue as row `index[i]`."""
        sources, held = index.tolist(), dict(held_states(self._layers))
        if held and sources != [*range(len(next(iter(held.values()))))]:
            self._replace(select_rows(held, index))
        self.taken = [{**self.taken[source]} for source in sources] if self.taken else []

    def _replace(self, states: States) -> None:
        """Put tensors of other rows, or of fewer inputs, in place of those held."""
        for (layer_idx, name, state_idx), tensor in states.items():
            layer = self._layers[layer_idx]
            (layer.conv_states if name == "conv" else layer.recurrent_states)[state_idx] = tensor

    def record_past(self) -> None:
        """Let convolutions keep all their inputs until `crop`."""
        for layer in self._layers.values():
            layer.record_past = True

    def can_crop(self, num_columns: int) -> bool:
        """Return whether the last columns can be taken back: of convolutions alone that have kept their inputs."""
        is_held = False
        for (layer_idx, name, state_idx), held in held_states(self._layers):
            layer, is_held = self._layers[layer_idx], True
            width = layer.conv_kernel_size[state_idx] or 0
            if name != "conv" or not layer.record_past or held.shape[-1] - num_columns < width:
                return False
        return is_held

    def crop(self, num_columns: int, n: int, pads: Sequence[int]) -> None:
        """Take back columns; `n` are left, 0 or as many as there were unless `can_crop` allows others."""
        if not n:
            clear_states(self._layers)
        elif num_columns:
            kept = {key: held[..., : held.shape[-1] - num_columns] for key, held in held_states(self._layers)}
            self._replace({key: without_past(self._layers, key, held).contiguous() for key, held in kept.items()})
        for pad, taken in zip(pads, self.taken, strict=False):
            for num_tokens in [each for each in taken if each > n - pad]:
                del taken[num_tokens]
        self.next_place = 0

    def copy_to(self, other: "RowStates") -> None:
        """Give other rows the states of these, in memory of their own."""
        other.put(copied(self.read()))
        other.taken = [{**taken} for taken in self.taken]
