# What the commands in this folder share; sourced by them, not run. Sets `work`, `test_command` and `oldest_transformers`.
#
# Copies what git knows of, or would add, into an empty folder and goes there, so that nothing that lies about in a checkout helps a
# test to pass. KEEP=1 leaves the folder for a look; PYTHON=python3.13 takes another Python than the README's commands do.
set -uo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/hf-paged-cache-ci.XXXXXX")
trap '[ -n "${KEEP:-}" ] || rm -rf "$work"' EXIT
cd "$repository" || exit 1

if ! git ls-files -z --cached --others --exclude-standard --deduplicate |
    while IFS= read -r -d '' file; do [ ! -f "$file" ] || printf '%s\0' "$file"; done |
    tar --create --null --files-from=- | tar --extract --directory "$work"; then
    echo "could not copy the tree" >&2
    exit 1
fi
cd "$work" || exit 1

test_command=$(grep -m 1 "^python3.11 -m venv .*pytest" README.md)
[ -z "${PYTHON:-}" ] || test_command=${test_command/#python3.11/"$PYTHON"}
oldest_transformers=$(sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
if [ -z "$test_command" ] || [ -z "$oldest_transformers" ]; then
    echo "README.md has no test command, or pyproject.toml no range of transformers" >&2
    exit 1
fi

failed=()
step() { # step NAME COMMAND...: run it, say how long it took, and remember whether it failed
    local name=$1 started=$SECONDS
    shift
    echo "== $name"
    if "$@"; then
        echo "== $name: passed in $((SECONDS - started)) s"
    else
        echo "== $name: FAILED after $((SECONDS - started)) s" >&2
        failed+=("$name")
    fi
}

installed_package_is_tested() {
    local where
    where=$(cd / && "$work/.venv/bin/python" -P -c 'import hf_paged_cache; print(hf_paged_cache.__file__)') || return 1
    [[ $where == "$work"/.venv/lib/* ]] || { echo "imported from $where" >&2 && return 1; }
}

install_oldest_transformers() {
    .venv/bin/pip install -q "transformers==$oldest_transformers" || return 1
    .venv/bin/python - "$oldest_transformers" <<'END'
import importlib.metadata, sys
from packaging.version import Version
sys.exit(Version(importlib.metadata.version("transformers")) != Version(sys.argv[1]))
END
}

finish() { # exit with 1 if any step failed
    if [ ${#failed[@]} -gt 0 ]; then
        printf 'FAILED: %s\n' "${failed[@]}" >&2
        exit 1
    fi
    echo "all passed in $SECONDS s"
}
