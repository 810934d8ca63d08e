"""lm-evaluation-harness on a prefix cache, from Python: the tasks in `lm_eval/`, without it and with it.

pip install '.[demo,neighbours]' && python examples/lm_eval_few_shot.py [--limit 12]

From the harness's own command line: hf-paged-cache run lm_eval --model hf-paged ... (docs/run.md).
"""

import argparse
import time
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import hf_paged_cache.lm_eval  # noqa: F401  registers hf-paged
from hf_paged_cache.cli.demo_model import load_demo_model

parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
parser.add_argument("--limit", type=int, default=12, help="rows of each task")
given = parser.parse_args()
model, tokenizer = load_demo_model()
tasks = TaskManager(include_path=str(Path(__file__).with_name("lm_eval")), include_defaults=False)
for task in ("reviews_asked", "reviews_chosen", "reviews_read"):
    for name in ("hf", "hf-paged"):
        started = time.process_time()
        arguments = {"pretrained": model, "tokenizer": tokenizer, "batch_size": 8}
        found = simple_evaluate(name, arguments, tasks=[task], task_manager=tasks, limit=given.limit, bootstrap_iters=0)
        print(f"{name:<8}  {time.process_time() - started:5.1f} s of CPU time  {found['results'][task]}")
