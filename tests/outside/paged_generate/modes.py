"""How a call of `generate` runs on a `PagedPrefixCache`, in each mode; the first line of each says it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, PrefixStore, UnsupportedModelError

from .calls import Call, Repeatable
from .comparison import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable

_NUM_MODELS = 4  # whose caches are kept; a suite makes thousands of models
_NUM_BLOCKS = 2048
_BLOCK_SIZE = 4  # prompts of such tests are short
_BLOCK_SIZES = (1, 2, 3, 4)
_UNFILLED = "is the placeholder of"


def is_ours(cache: Any) -> bool:
    """Whether it is a cache of ours, or the rows of a call on one, which is what that call returns."""
    return bool(getattr(cache, "is_paged_prefix_cache", False))


def cache_of(cache: Any) -> PagedPrefixCache | None:
    """The cache of such rows, if it is there yet; a cache's own is itself."""
    handle = getattr(cache, "handle", None)
    found = cache if handle is None else handle()
    return found if isinstance(found, PagedPrefixCache) else None


def brought_as(cache: Any) -> Any:
    """What the test has passed: of rows that a call has returned, other rows are passed on, which have not begun."""
    previous = getattr(cache, "previous", None)
    return cache if previous is None else previous


class Mode:
    """Decides of each call whether it runs on a cache of ours, and runs it.

    Attributes:
        num_replaced: calls that ran on a cache of ours.
        num_prompt_tokens, num_reused: theirs.
        refused: why the others ran as ever -> how many.
    """

    is_run_twice = False

    def __init__(self) -> None:
        self.num_replaced = self.num_prompt_tokens = self.num_reused = 0
        self.refused: Counter[str] = Counter()
        # id of a model, which its cache holds -> cache
        self._caches: OrderedDict[int, PagedPrefixCache] = OrderedDict()
        self._running: list[Any] = []  # caches of ours that calls were given here

    def run(self, model: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of `generate`.

        Args:
            original: the function as it was, bound to the model.
        """
        call = Call(model, original, args, kwargs)
        if self._is_running(call.cache):
            return original(*args, **kwargs)
        if self.has_begun(call.cache):
            return self._replace_unless_refused(call, call.cache)
        why_as_ever = call.why_as_ever(is_run_twice=self.is_run_twice)
        cache = None
        if why_as_ever is None:
            try:
                cache = self._cache_of(model)
            except UnsupportedModelError as error:
                why_as_ever = f"not supported: {_without_names(str(error), model)}"
        if cache is None:
            self.refused[why_as_ever or ""] += 1
            return original(*args, **kwargs)
        return self._replace_unless_refused(call, cache)

    def _is_running(self, cache: Any) -> bool:
        """Whether a call that was given it here has not returned: it, or the rows of that call."""
        ours = (cache, cache_of(cache), brought_as(cache))
        return cache is not None and any(each is one for each in self._running for one in ours)

    def _replace_unless_refused(self, call: Call, cache: PagedPrefixCache) -> Any:
        """Run a call on a cache of ours; as ever where its ids, which tests draw at random, ask for an image that is not there."""
        before = Repeatable(call)
        self.num_replaced += 1
        try:
            return self._replace(call, cache)
        except CacheArgumentError as error:
            if _UNFILLED not in str(error):
                raise
            self.num_replaced -= 1
            self.refused["ids have a placeholder that nothing fills"] += 1
            before.put_back()
            return call.run()

    def has_begun(self, cache: Any) -> bool:
        """Whether a call that brings this cache continues with one that was compared here, so that it can be, too."""
        return False

    def _replace(self, call: Call, cache: PagedPrefixCache) -> Any:
        """Run a call; given the cache that is kept for its model, or the one that it brings."""
        raise NotImplementedError

    def _run_on(self, call: Call, cache: PagedPrefixCache, **more: Any) -> Any:
        self._running.append(brought_as(cache))
        try:
            return call.run_on(cache, **more)
        finally:
            self._running.pop()
            handle = cache_of(cache)
            if handle is not None:
                self.num_prompt_tokens += handle.last_call.prompt_tokens
                self.num_reused += handle.last_call.reused_tokens

    def _cache_of(self, model: Any) -> PagedPrefixCache:
        cache = self._caches.get(id(model))
        if cache is None:
            store = PrefixStore(model, block_size=self._block_size(), num_blocks=_NUM_BLOCKS)
            self._caches[id(model)] = cache = PagedPrefixCache(store)
        self._caches.move_to_end(id(model))
        if len(self._caches) > _NUM_MODELS:
            self._caches.popitem(last=False)
        return cache

    def _block_size(self) -> int:
        return _BLOCK_SIZE


class Kept(Mode):
    """one cache a model, kept between calls"""

    def _replace(self, call: Call, cache: PagedPrefixCache) -> Any:
        return self._run_on(call, cache)


class Fresh(Mode):
    """a cache a call, on one store a model"""

    def _replace(self, call: Call, cache: PagedPrefixCache) -> Any:
        return self._run_on(call, cache.sibling())


class Compared(Mode):
    """A call is run twice, and the test gets the second result, after a comparison."""

    is_run_twice = True

    def _replace(self, call: Call, cache: PagedPrefixCache) -> Any:
        everything = {"return_dict_in_generate": True, "output_logits": True} if call.has_usual_result else {}
        before = Repeatable(call)
        wanted, error = None, None
        try:
            wanted = self._first(call, cache, everything)
        except Exception as raised:  # noqa: BLE001  # whatever it is, the second call is to raise, too
            error = raised
        before.put_back()
        try:
            got = self._second(call, cache, everything)
        except Exception as raised:
            if error is None:
                raise
            raise error from raised  # both fail: the test may expect it
        if error is not None:
            raise AssertionError(
                f"this call fails without a PagedPrefixCache, and returns with one: {error!r}"
            ) from error
        assert_same(wanted, got)
        self._compared(wanted, got)
        return _as_asked(call, got) if everything else got

    def _first(self, call: Call, cache: PagedPrefixCache, everything: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _second(self, call: Call, cache: PagedPrefixCache, everything: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _compared(self, wanted: Any, got: Any) -> None:
        """Both are the same."""


class Twice(Compared):
    """each call made twice on one cache a model, with blocks of 1, 2, 3 or 4 tokens, and compared"""

    def __init__(self) -> None:
        super().__init__()
        self._num_models = 0

    def _block_size(self) -> int:
        self._num_models += 1
        return _BLOCK_SIZES[self._num_models % len(_BLOCK_SIZES)]

    def _first(self, call: Call, cache: PagedPrefixCache, everything: dict[str, Any]) -> Any:
        return self._run_on(call, cache, **everything)

    _second = _first


class Beside(Compared):
    """each call beside DynamicCache, compared, on a cache of its own on one store a model; calls that resume, too"""

    def __init__(self) -> None:
        super().__init__()
        # a cache of ours -> transformers', after the same
        self._twins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def has_begun(self, cache: Any) -> bool:
        if not is_ours(cache) or self._is_running(cache):
            return False
        brought = brought_as(cache)
        twin = self._twins.get(brought)
        # else the test has run forwards on it
        return twin is not None and twin.get_seq_length() == brought.get_seq_length()

    def _first(self, call: Call, cache: PagedPrefixCache, everything: dict[str, Any]) -> Any:
        twin = self._twins.get(brought_as(call.cache)) if call.cache is not None else None
        return call.run(**everything, **({} if twin is None else {"past_key_values": twin}))

    def _second(self, call: Call, cache: PagedPrefixCache, everything: dict[str, Any]) -> Any:
        return self._run_on(call, cache.sibling() if call.cache is None else cache, **everything)

    def _compared(self, wanted: Any, got: Any) -> None:
        ours = getattr(got, "past_key_values", None)
        if is_ours(ours):
            self._twins[ours] = wanted.past_key_values


MODES: dict[str, type[Mode]] = {"kept": Kept, "twice": Twice, "beside": Beside, "fresh": Fresh}


def _as_asked(call: Call, output: Any) -> Any:
    """A result without what the test has not asked for."""
    if not call.option("return_dict_in_generate"):
        return output.sequences
    if call.option("output_logits"):
        return output
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})


def _without_names(reason: str, model: Any) -> str:
    """A refusal that is counted with those of other models."""
    return reason.removeprefix(type(model).__name__).lstrip(": ")[:100]
