"""Plays the calls of one user on one model, with the cache that transformers makes and with ours, and compares them.

Each call that reuses is played a second time with zeros in place of what it reuses: if nothing differs then, the
comparison sees nothing, and the cell is *blind*.
"""

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import PagedPrefixCache, PrefixStore
from hf_paged_cache.model.layers import own_cache_class, presented
from hf_paged_cache.model.support import cache_argument, other_version
from hf_paged_cache.model.trial import dynamic_cache, input_device

from ..internals import depends_on_length, state_rules, zero_states, zero_window_blocks
from ..reference import TOLERANCE, run, zero_blocks
from .zoo import extra_inputs

BLOCK_SIZE = 8
ALWAYS: dict[str, Any] = {"max_new_tokens": 5, "use_cache": True}  # a config may switch the cache off
FACTOR = 5  # times the distance of `DynamicCache` from itself, where that is larger than TOLERANCE


@dataclass
class Setting:
    """How all caches are built.

    Attributes:
        most_blocks: of a store; scenes need not reuse then, and nothing is zeroed. None: as a scene asks.
        capture: see `PagedPrefixCache`.
    """

    most_blocks: int | None = None
    capture: Any = False


setting = Setting()


class CellError(Exception):
    """Why a cell is not as it should be.

    Args:
        outcome: "different", "blind", "no reuse" or "uncovered".
    """

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(f"{outcome}: {detail}")
        self.outcome = outcome
        self.detail = detail


@dataclass
class Measured:
    """What was seen of a model so far, over all its cells.

    Attributes:
        references: arguments of a call -> its output with the cache that transformers makes.
        distance: the largest of our logits from the reference's, as a share of their scale.
        own_distance: the largest of `DynamicCache` continued from its own prefix, where that had to be measured.
        unreused: reasons that `last_call` gave where a call reused nothing and was allowed to.
    """

    references: dict[Any, Any] = field(default_factory=dict)
    distance: float = 0.0
    own_distance: float = 0.0
    unreused: set[str] = field(default_factory=set)


class Player:
    """Plays the calls of a scene.

    Args:
        name: of the type or variant, which may pass more than tokens.
        zeroed: every hit is played with zeros in place of all blocks, and must differ; nothing else is compared.
        windowed: zeros in place of window blocks alone, which are to be those of these layers; None: of all blocks.
        states_alone: zeros in place of states alone; else of blocks, too.
        reused: tokens that each hit of the true play has reused, in order; filled there, read when zeroed.
    """

    always: ClassVar[dict[str, Any]] = ALWAYS

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        measured: Measured,
        reused: list[int],
        *,
        zeroed: bool,
        windowed: set[int] | None = None,
        states_alone: bool = False,
    ) -> None:
        self.name = name
        self.model = model
        self.measured = measured
        self.zeroed = zeroed
        self.windowed = windowed
        self.states_alone = states_alone
        self.reused = reused
        self._num_hits = 0
        self._rope_changes = depends_on_length(model)
        self.build()

    def build(self, *, num_blocks: int | None = 256, block_size: int = BLOCK_SIZE) -> None:
        """Another store, and a cache on it."""
        num_blocks = setting.most_blocks or num_blocks
        self.store = PrefixStore(self.model, block_size=block_size, num_blocks=num_blocks)
        self.cache = PagedPrefixCache(self.store, capture=setting.capture)

    @property
    def takes_positions(self) -> bool:
        """Whether keys and values are the same whatever the padding."""
        return self.store.argument_reader.takes_positions

    @property
    def has_states(self) -> bool:
        """Whether layers carry any."""
        return state_rules(self.store) is not None

    @property
    def has_windows(self) -> bool:
        """Whether some layers see a window."""
        return bool(self.store.fingerprint.windows)

    @property
    def unit(self) -> int:
        """Tokens that lengths of prompts count in."""
        return 64 if self.has_states else BLOCK_SIZE

    @property
    def keeps_every_block(self) -> bool:
        """Whether convolutions alone carry states, so that one can be kept at every block."""
        rules = state_rules(self.store)
        return rules is not None and rules.is_recorded

    @property
    def clamps_one_token(self) -> bool:
        """Whether what is generated is computed otherwise than a prompt, and so never found."""
        rules = state_rules(self.store)
        return rules is not None and rules.clamps_one_token

    def places(self, num_tokens: int, *, of_prompt: int | None = None) -> int:
        """Of so many tokens, those up to the last place where a prompt can be hit: a full block, or where states are
        kept.

        Args:
            of_prompt: how many of them are the prompt's; None: all.
        """
        if of_prompt is not None and self.clamps_one_token:
            num_tokens = of_prompt
        size = self.store.blocks.align if self.has_states else BLOCK_SIZE
        return num_tokens // size * size

    def takes(self, output_flag: str) -> bool:
        """Whether calls may ask for this output: of all models for hidden states and attentions."""
        return output_flag != "output_router_logits" or output_flag in inspect.signature(self.model.forward).parameters

    def forward(self, **arguments: Any) -> None:
        """A plain forward of new rows on the cache, which must have the last logits of one on transformers' own."""
        device = input_device(self.model)
        arguments = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in {"use_cache": True, **self._completed(arguments)}.items()
        }
        mask = arguments["attention_mask"]
        if self.takes_positions:
            arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        if self.store.argument_reader.takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        model = copy.deepcopy(self.model) if self._rope_changes else self.model
        name = cache_argument(type(model))
        with torch.no_grad():
            try:
                wanted = model(**{**arguments, name: presented(model, dynamic_cache(model))}).logits
            except Exception as error:
                raise CellError("uncovered", f"without our cache: {type(error).__name__}: {error}") from error
            logits = self.model(**arguments, **{name: self.cache}).logits
        self.cache.check()
        last, wanted = logits[:, -1], wanted[:, -1]
        distance = float((last - wanted).abs().max() / wanted.abs().max())
        if not self.zeroed and not distance <= TOLERANCE:
            raise CellError("different", f"logits of a forward differ by {distance:.1e} of their scale")
        self.measured.distance = max(self.measured.distance, distance)

    def fill(self, **arguments: Any) -> None:
        """A call that is not compared: it makes its prompt known."""
        run(self.model, self.cache, **{**ALWAYS, "max_new_tokens": 1, **self._completed(arguments)})

    def reference(self, **arguments: Any) -> Any:
        """The same call with the cache that transformers makes."""
        arguments = {**self.always, **self._completed(arguments)}
        # MiniMax's forgets to reorder states
        if arguments.get("num_beams", 1) > 1 and own_cache_class(self.model) is not None:
            arguments["use_cache"] = False
        key = tuple((name, _hashable(value)) for name, value in sorted(arguments.items()))
        model = self.model
        if self._rope_changes:  # frequencies stay as a forward left them, so the model has a state
            model = copy.deepcopy(model)
            self.measured.references.pop(key, None)
        if key not in self.measured.references:
            try:
                self.measured.references[key] = run(model, **arguments)
            except Exception as error:
                raise CellError("uncovered", f"without our cache: {type(error).__name__}: {error}") from error
        return self.measured.references[key]

    def call(self, *, reused: int | None = None, at_least: int | None = None, **arguments: Any) -> Any:
        """One call that may, by the numbers given, reuse tokens. Returns the reference's output."""
        reference = self.reference(**arguments)
        output = self._run(arguments)
        if not self.zeroed:
            self._require_same(reference, output, arguments)
            self._require_reuse(reused, at_least)
        return reference

    def hit(self, *, sees_windows: bool = True, **arguments: Any) -> Any:
        """A call that reuses; zeroed, it must differ.

        Args:
            sees_windows: its new tokens see something of what it reuses in layers with a window; if not, zeros there
                alone must change nothing.
        """
        self._num_hits += 1
        if setting.most_blocks is not None:
            return self.call(**arguments)
        if not self.zeroed:
            reference = self.call(**arguments)
            self.reused.append(self.cache.last_call.reused_tokens)
            return reference
        for name in ("reused", "at_least"):
            arguments.pop(name, None)
        reference = self.reference(**arguments)
        self._zero()
        output = self._run(arguments)
        if self.reused[self._num_hits - 1]:
            distance = self._distance(reference, output, arguments)
            changes = distance > max(TOLERANCE, FACTOR * self.measured.own_distance)
            if changes and self.windowed is not None and not sees_windows:
                raise CellError("different", f"hit {self._num_hits}: new tokens see window blocks after their window")
            if not changes and (self.windowed is None or sees_windows):
                raise CellError("blind", f"hit {self._num_hits}: zeros in place of what is reused change nothing")
        return reference

    def _zero(self) -> None:
        if self.windowed is None:
            zero_states(self.store)
            if not self.states_alone:
                zero_blocks(self.store)
        elif (zeroed := zero_window_blocks(self.store)) != self.windowed:
            raise CellError("blind", f"the layers with window blocks are {sorted(zeroed)}, not {sorted(self.windowed)}")

    @property
    def reuses(self) -> bool:
        """Whether this type's calls may reuse anything: not where they pass more than tokens."""
        return not extra_inputs(self.name, torch.zeros(1, 1, dtype=torch.int64))

    def _completed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {**extra_inputs(self.name, arguments["input_ids"]), **arguments}

    def _run(self, arguments: dict[str, Any]) -> Any:
        output = run(self.model, self.cache, **{**self.always, **self._completed(arguments)})
        self.cache.check()
        return output

    def _require_same(self, reference: Any, output: Any, arguments: dict[str, Any]) -> None:
        distance = self._distance(reference, output, arguments)
        allowed = self._tolerance(arguments, distance)
        if distance > allowed:
            what = "other tokens" if distance == float("inf") else f"logits differ by {distance:.1e} of their scale"
            raise CellError("different", f"{what} ({allowed:.0e} allowed); {self._said()}")
        self.measured.distance = max(self.measured.distance, distance)

    def _distance(self, reference: Any, output: Any, arguments: dict[str, Any]) -> float:
        """That from the reference; with another transformers than the tested one, where drafts change tokens, from what
        is written without.

        They are to change nothing, but transformers' own do: in 5.17 those of Inkling, which has states and a window.
        """
        distance = distance_of(reference, output)
        if distance == float("inf") and "prompt_lookup_num_tokens" in arguments and other_version():
            without = {name: value for name, value in arguments.items() if name != "prompt_lookup_num_tokens"}
            distance = distance_of(self.reference(**without), output)
        return distance

    def _tolerance(self, arguments: dict[str, Any], distance: float) -> float:
        """What is allowed: measured anew where the usual does not do."""
        if distance <= TOLERANCE:
            return TOLERANCE
        own = own_distance(self.model, arguments)
        self.measured.own_distance = max(self.measured.own_distance, own)
        return max(TOLERANCE, FACTOR * own)

    def _require_reuse(self, reused: int | None, at_least: int | None) -> None:
        counts = self.cache.last_call
        if setting.most_blocks is not None:
            return
        known = counts.reused_tokens + counts.shared_tokens  # of earlier calls, and of equal rows
        least = reused if at_least is None else at_least
        if not known and least and _may_compute_all(self._said()):
            self.measured.unreused.add(self._said())
            return
        if self._rope_changes and known < (least or 0):
            self.measured.unreused.add(ROPE_CHANGES)
            return
        if reused is not None and known != reused and not (self._rope_changes and known > reused):
            raise CellError("no reuse", f"{known} tokens reused, not {reused}: {self._said()}")
        if at_least is not None and known < at_least:
            raise CellError("no reuse", f"{known} tokens reused, not {at_least}: {self._said()}")

    def _said(self) -> str:
        return " | ".join(dict.fromkeys(row.stopped for row in self.cache.last_call.rows))


ROPE_CHANGES = "its rotary frequencies change with length, and a prefix was known with others"
# Reasons, documented as such, for which a whole prompt is computed.
_DOCUMENTED = (
    "the model cannot say which logits it needs while drafts are verified",
    "the argument token_type_ids may condition keys and values",
)


def _may_compute_all(said: str) -> bool:
    return any(reason in said for reason in _DOCUMENTED)


def distance_of(reference: Any, output: Any) -> float:
    """The largest difference of any step's raw logits, as a share of the reference's largest; inf for other tokens."""
    if len(output.logits) != len(reference.logits):
        return float("inf")
    scale = max(float(step[step.isfinite()].abs().max()) for step in reference.logits)
    largest = 0.0
    for wanted, got in zip(reference.logits, output.logits, strict=True):
        if got.shape != wanted.shape or not bool((got.isfinite() == wanted.isfinite()).all()):
            return float("inf")
        finite = wanted.isfinite()
        largest = max(largest, float((got[finite] - wanted[finite]).abs().max()) / scale)
    return largest if torch.equal(reference.sequences, output.sequences) else float("inf")


def own_distance(model: PreTrainedModel, arguments: dict[str, Any]) -> float:
    """How far `DynamicCache`, continued greedily from its own prefix, is from itself: the worst of a few prefixes."""
    ids = arguments["input_ids"]
    mask = arguments.get("attention_mask", torch.ones_like(ids))
    whole = run(model, input_ids=ids, attention_mask=mask, **ALWAYS)
    worst = 0.0
    for column in (ids.shape[1] // 3, ids.shape[1] * 2 // 3, ids.shape[1] - 1):
        cache = DynamicCache(config=model.config)
        try:
            prefix = {"input_ids": ids[:, :column], "attention_mask": mask[:, :column]}
            model.generate(**prefix, past_key_values=cache, use_cache=True, max_new_tokens=1, do_sample=False)
            output = run(model, input_ids=ids, attention_mask=mask, past_key_values=cache, **ALWAYS)
        except Exception:  # noqa: BLE001 (a model that cannot be continued allows nothing more)
            return 0.0
        distance = distance_of(whole, output)
        worst = max(worst, 0.0 if distance == float("inf") else distance)
    return worst


def _hashable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
