"""Run programs of others with and without `hf-paged-cache run`, and compare what they print.

python -m tests.programs [NAME ...]
"""

import sys
import tempfile
from difflib import unified_diff
from pathlib import Path

from tests.programs.comparing import EXIT_CODES, NAMES, compared, save_model


def main() -> int:
    names, num_different = sys.argv[1:] or NAMES, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_model(Path(temporary) / "model")
        for name in names:
            plain, ours = compared(name, folder, Path(temporary) / "stats.jsonl")
            same = plain.stdout == ours.stdout and plain.exit_code == ours.exit_code == EXIT_CODES.get(name, 0)
            num_different += not same
            reused = sum(model["reused_tokens"] + model["shared_tokens"] for model in ours.models)
            prompt = sum(model["prompt_tokens"] for model in ours.models)
            print(
                f"{name:<16} {'same' if same else 'DIFFERENT'}, exit code {ours.exit_code}; {reused} of {prompt} not computed"
            )
            if not same:
                print(*unified_diff(plain.stdout.decode().splitlines(), ours.stdout.decode().splitlines()), sep="\n")
                print(ours.stderr)
    print(f"{num_different} of {len(names)} different")
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
