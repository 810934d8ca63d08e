"""A service on Ray Serve: each replica has a model and a cache, and Ray's router sends a prompt to the replica that
knows most of it.

pip install 'ray[serve]>=2.50'; python examples/ray_serve.py [--model FOLDER_OR_NAME] [--replicas 2] [--port 8000]
[--stay]

It asks a few questions of two tasks, as clients would, and ends; with --stay it keeps serving:
curl localhost:8000/complete -H 'content-type: application/json' -d '{"prompt": "Snow is", "max_new_tokens": 8}'
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import ray
from fastapi import FastAPI
from pydantic import BaseModel, Field
from ray import serve
from ray.serve.config import RequestRouterConfig

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.demo_model import load_demo_model

try:
    from ray.serve.llm.request_router import PrefixCacheAffinityRouter
except ImportError:  # that module wants a serving engine, which the router itself does not need
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter

REVIEWS = [json.loads(line) for line in Path(__file__).with_name("reviews.jsonl").read_text("utf-8").splitlines()]
MOST_ROWS = 8  # of a batch

api = FastAPI()


class Prompt(BaseModel):
    """What a client sends. The router reads the attribute `prompt`."""

    prompt: str = Field(min_length=1)
    max_new_tokens: int = Field(default=16, ge=1, le=512)


@serve.deployment(
    max_ongoing_requests=2 * MOST_ROWS,
    request_router_config=RequestRouterConfig(
        request_router_class=PrefixCacheAffinityRouter,
        # A replica that has a batch more to do than another gets no more prompts, known or not. The router's memory is
        # bounded.
        request_router_kwargs={"imbalanced_threshold": MOST_ROWS, "do_eviction": True},
    ),
)
class Completions:
    """A model with its cache; requests that wait at once run as one batch."""

    def __init__(self, model: str | None) -> None:
        self.model, self.tokenizer = load_demo_model(model)
        self.tokenizer.padding_side = "left"
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.cache = PagedPrefixCache(self.model)

    @serve.batch(max_batch_size=MOST_ROWS, batch_wait_timeout_s=0.01)
    async def complete(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self.generate, prompts)  # the replica answers Ray meanwhile

    def generate(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        texts = [each.prompt for each in prompts]
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        inputs = inputs.to(self.model.device)
        most = max(each.max_new_tokens for each in prompts)
        output = self.model.generate(**inputs, past_key_values=self.cache, max_new_tokens=most, do_sample=False)
        start, call = inputs.input_ids.shape[1], self.cache.last_call
        rows = [row[start : start + each.max_new_tokens] for row, each in zip(output, prompts, strict=True)]
        return [
            {
                "completion": self.tokenizer.decode(row, skip_special_tokens=True),
                "replica": serve.get_replica_context().replica_id.unique_id,
                "rows": len(prompts),
                "prompt_tokens": call.prompt_tokens,  # of all rows of the batch, as the next one
                "reused_tokens": call.reused_tokens,
            }
            for row in rows
        ]


@serve.deployment(ray_actor_options={"num_cpus": 0})
@serve.ingress(api)
class Front:
    """HTTP, and the router. It waits for replicas most of the time, and needs no core of its own."""

    def __init__(self, completions: Any) -> None:
        self.completions = completions

    @api.post("/complete")
    async def complete(self, prompt: Prompt) -> dict[str, Any]:
        return await self.completions.complete.remote(prompt)


def ask(port: int, text: str) -> dict[str, Any]:
    """What a client does."""
    body = json.dumps({"prompt": text, "max_new_tokens": 3}).encode()
    request = Request(f"http://127.0.0.1:{port}/complete", body, {"content-type": "application/json"})
    with urlopen(request, timeout=300) as response:
        return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--questions", type=int, default=12, help="of each of two tasks")
    parser.add_argument("--stay", action="store_true", help="keep serving until Ctrl-C")
    given = parser.parse_args()

    shots = REVIEWS[:6]
    tasks = {
        "Sentiment": "".join(f"Review: {each['text']}\nSentiment: {each['label']}\n\n" for each in shots),
        "Words": "".join(f"Review: {each['text']}\nWords: {len(each['text'].split())}\n\n" for each in shots),
    }
    texts = {
        task: [f"{task}\n\n{shown}Review: {each['text']}\n{task}:" for each in REVIEWS[6 : 6 + given.questions]]
        for task, shown in tasks.items()
    }
    replicas: dict[str, Counter[str]] = {task: Counter() for task in tasks}

    def client(task: str, asked: list[str]) -> None:
        for text in asked:
            answer = ask(given.port, text)
            replicas[task][answer["replica"]] += 1
            print(
                f"{task}: {answer['completion'].strip().partition(chr(10))[0]!r}, batch of {answer['rows']}, "
                f"reused {answer['reused_tokens']} of {answer['prompt_tokens']} tokens"
            )

    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    serve.start(http_options={"port": given.port})
    try:
        serve.run(Front.bind(Completions.options(num_replicas=given.replicas).bind(given.model)))
        start = time.perf_counter()
        for task, asked in texts.items():
            client(task, asked[:1])
        with ThreadPoolExecutor(len(tasks)) as clients:
            list(clients.map(client, texts, [asked[1:] for asked in texts.values()]))
        print(f"{sum(map(len, texts.values()))} answers in {time.perf_counter() - start:.1f} s")
        for task, counts in replicas.items():
            print(f"{task} ran on replica {', '.join(counts)}")
        while given.stay:
            time.sleep(1)
    except KeyboardInterrupt:
        pass
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
