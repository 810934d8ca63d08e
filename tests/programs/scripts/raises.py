import os
import sys

print(sys.path[0] == os.path.dirname(os.path.abspath(__file__)), "site" in sys.path[1], "transformers" in sys.modules)
print([name for name in sys.modules if name.startswith("hf_paged_cache") and name.count(".") > 2])
raise ValueError("on purpose")
