"""`python -m hf_paged_cache` is the command `hf-paged-cache`."""

from .cli import main

if __name__ == "__main__":
    main()
