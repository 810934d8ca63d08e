import atexit
import sys

from shared import QUESTIONS, ask, load

atexit.register(print, "at exit")
model, tokenizer = load()
for question in QUESTIONS[:2]:
    print(ask(model, tokenizer, question)[0].tolist())
print(__name__, sys.argv[1:], sys.path[0])
sys.exit(3)
