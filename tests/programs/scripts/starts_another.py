import subprocess
import sys
from pathlib import Path

print(
    subprocess.run([sys.executable, Path(__file__).with_name("greedy.py"), sys.argv[1]], stdout=subprocess.PIPE).stdout
)
