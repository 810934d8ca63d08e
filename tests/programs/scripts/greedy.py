import argparse

from shared import QUESTIONS, ask, load

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--stats", default="none")  # an option that the command has, too
given = parser.parse_args()
model, tokenizer = load()
for question in QUESTIONS:
    print(ask(model, tokenizer, question)[0].tolist(), given.stats)
print(ask(model, tokenizer, QUESTIONS).tolist(), __name__)
