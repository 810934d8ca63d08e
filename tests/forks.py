"""Forks while threads generate: every child generates rightly, or refuses with an error of ours, in time.

Run it with `python -m tests.forks --times 200 --seconds 2`. Four threads generate on caches of one store. A child has
none of them, but what they held: it tries the cache of a thread that was in a call, a new cache of the same store, a new
store, and a reset. What hangs is killed and counted.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from hf_paged_cache import PagedPrefixCache, PrefixStore
from hf_paged_cache.errors import PagedCacheError

from .promise.test_interrupted_calls import CALLS as ALL_CALLS
from .reference import assert_same, run
from .tiny_models import tiny

NUM_THREADS = 4
# threads share torch's generator
CALLS = {name: given for name, given in ALL_CALLS.items() if "do_sample" not in given}
NUM_NEW = 3
# exit status of a child -> what it says
OUTCOMES = {0: "right", 1: "refused by an error of ours", 2: "WRONG", 3: "FAILED"}
MAY_REFUSE = ("the cache of a thread",)


class Threads:
    """Four threads that generate until they are told to stop."""

    def __init__(self) -> None:
        self.model = tiny("llama")
        self.references = {n: run(self.model, max_new_tokens=NUM_NEW, **given) for n, given in CALLS.items()}
        self.store = PrefixStore(self.model, block_size=4, num_blocks=150)
        self.caches = [PagedPrefixCache(self.store) for _ in range(NUM_THREADS)]
        self.errors: list[BaseException] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(NUM_THREADS)]

    def __enter__(self) -> Threads:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        sys.setswitchinterval(self._interval)

    def generate(self, cache: PagedPrefixCache, name: str) -> None:
        """One call, compared. Unseeded: the lock in torch's `manual_seed` would be one that a child may find taken."""
        asked = {"max_new_tokens": NUM_NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        assert_same(self.references[name], self.model.generate(**CALLS[name], **asked, past_key_values=cache))

    def _work(self, number: int) -> None:
        rng = random.Random(number)
        try:
            while not self._over.is_set():
                self.generate(self.caches[number], rng.choice([*CALLS]))
        except BaseException as error:  # noqa: BLE001  # told to the main thread
            self.errors.append(error)

    def deeds(self, rng: random.Random) -> dict[str, Callable[[], Any]]:
        """What a child tries."""
        name = rng.choice([*CALLS])
        return {
            "the cache of a thread": lambda: self.generate(rng.choice(self.caches), name),
            "a new cache of the store": lambda: self.generate(PagedPrefixCache(self.store), name),
            "a new store": lambda: self.generate(PagedPrefixCache(PrefixStore(self.model, num_blocks=100)), name),
            "a reset": self.store.reset_prefix_cache,
        }


def _be_a_child(deed: Callable[[], Any], seconds: float) -> None:
    status = 3
    try:
        faulthandler.dump_traceback_later(0.9 * seconds)  # says where it hangs
        sys.setswitchinterval(0.005)
        deed()
        status = 0
    except PagedCacheError:
        status = 1
    except AssertionError:
        status = 2
        traceback.print_exc()
    except BaseException:  # noqa: BLE001  # a child never returns
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def forks(times: int, seconds: float, seed: int = 0) -> Counter[str]:
    """Fork that often, and wait so long for each child.

    Returns:
        how often each deed had each outcome.
    """
    rng, outcomes = random.Random(seed), Counter[str]()
    with Threads() as threads:
        for _ in tqdm(range(times), disable=None):
            time.sleep(0.03 * rng.random())
            what, deed = rng.choice([*threads.deeds(rng).items()])
            child = os.fork()
            if child == 0:
                _be_a_child(deed, seconds)
            deadline = time.monotonic() + seconds
            while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
                time.sleep(0.002)
            if ended[0] == 0:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                outcomes[f"{what}: HANGS"] += 1
            else:
                status = os.waitstatus_to_exitcode(ended[1])
                outcome = OUTCOMES.get(status, f"DIED with {status}")
                outcomes[f"{what}: {outcome if status != 1 or what in MAY_REFUSE else 'REFUSED'}"] += 1
    if threads.errors:
        raise threads.errors[0]
    return outcomes


def failed(outcomes: Counter[str]) -> bool:
    """Whether a child was wrong, hung, died, or refused what it may not."""
    return any(outcome.rpartition(": ")[2][:2].isupper() for outcome in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=2.0, help="that a child may take")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = forks(given.times, given.seconds, given.seed)
    for outcome, number in sorted(outcomes.items()):
        print(f"{number:6}  {outcome}")  # noqa: T201  # a command prints
    return failed(outcomes)


if __name__ == "__main__":
    sys.exit(main())
