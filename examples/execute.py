"""Run the notebook from top to bottom and store it with its outputs: pip install '.[bench]' && python
examples/execute.py

What differs from machine to machine or from run to run without a meaning (times of day, versions of the kernel) is left
out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

NOTEBOOK = Path(__file__).with_name("few_shot_prompt_reuse.ipynb")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute() -> None:
    """Effects: overwrites the notebook, unless a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str(NOTEBOOK.parent)}}
    options = {"timeout": 1800, "kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, resources=folder, **options).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata.clear()
        for output in cell.get("outputs", ()):
            output.get("metadata", {}).clear()
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    execute()
