import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

here = str(Path(__file__).parent)
cells = [
    f"import sys; sys.argv[1:] = [{sys.argv[1]!r}]; sys.path.insert(0, {here!r})",
    "from shared import QUESTIONS, ask, load\nmodel, tokenizer = load()",
    "for question in QUESTIONS:\n    print(ask(model, tokenizer, question)[0].tolist())",
    "ask(model, tokenizer, QUESTIONS[0])",
]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
for cell in notebook.cells:  # what a cell prints comes in pieces, by chance
    print("".join(output["text"] for output in cell.outputs if output.get("name") == "stdout"))
    print([output["data"]["text/plain"] for output in cell.outputs if "data" in output])
