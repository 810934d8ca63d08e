"""The notebook runs from top to bottom on a tiny model, its assertions hold, and what it stores is what it gives."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import hf_paged_cache

from .tiny_models import build

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("datasets")
pytest.importorskip("matplotlib")

PACKAGE = Path(hf_paged_cache.__file__).parent
EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "few_shot_prompt_reuse.ipynb"

pytestmark = pytest.mark.skipif(not NOTEBOOK.exists(), reason="the examples are not beside the tests")

COUNTS = """
import json

print(json.dumps({"loop": cache.stats().reused_tokens, "pool": small.stats().reused_tokens, "chat": as_generated}))
"""


def read_notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shape_of_outputs(cell: nbformat.NotebookNode) -> list[tuple[str, ...]]:
    """What kinds of output a cell has, without their content and without warnings, which other packages add to."""
    return [
        (output.output_type, output.name)
        if output.output_type == "stream"
        else (output.output_type, *sorted(output.data))
        for output in cell.outputs
        if output.get("name") != "stderr"
    ]


def make_tokenizer(texts: list[str]) -> Any:
    """Byte pairs of the notebook's own data: its prompt has about as many tokens as with a real tokenizer."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    pairs = ByteLevelBPETokenizer()
    pairs.train_from_iterator(texts, vocab_size=1024, special_tokens=["<pad>", "<eos>"], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=pairs._tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        model_input_names=["input_ids", "attention_mask"],
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the notebook's data, and a tiny model that the notebook will load."""
    build("llama", max_position_embeddings=4096, vocab_size=1024).save_pretrained(tmp_path / "model")
    shutil.copy(EXAMPLES / "reviews.jsonl", tmp_path)
    texts = (tmp_path / "reviews.jsonl").read_text("utf-8").splitlines()
    make_tokenizer(texts).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("HF_PAGED_CACHE_EXAMPLE_MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))  # the kernel imports what is tested, installed or not
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    return tmp_path


def test_it_runs_reuses_and_gives_the_outputs_that_it_stores(folder: Path) -> None:
    stored, notebook = read_notebook(), read_notebook()
    notebook.cells.append(nbformat.v4.new_code_cell(COUNTS))
    where = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", coalesce_streams=True, resources=where
    ).execute()
    *cells, counts = code_cells(notebook)
    assert [shape_of_outputs(cell) for cell in cells] == [shape_of_outputs(cell) for cell in code_cells(stored)]
    reused = json.loads(counts.outputs[0].text)
    assert reused["loop"] > 0
    assert reused["pool"] > 0
    assert all(number > 0 for number in reused["chat"][1:])


def test_it_is_stored_as_one_clean_run() -> None:
    notebook = read_notebook()
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(cell.metadata for cell in notebook.cells)
    assert notebook.metadata.kernelspec.name == "python3"
    assert sum("image/png" in shape for cell in cells for shape in shape_of_outputs(cell)) == 2
    assert not [
        output
        for cell in cells
        for output in cell.outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


def test_it_names_no_place_on_a_machine() -> None:
    text = "\n".join(
        [cell.source for cell in read_notebook().cells]
        + [output.get("text", "") for cell in code_cells(read_notebook()) for output in cell.outputs]
        + [json.dumps(read_notebook().metadata)]
    )
    assert not re.findall(r"(?:/home|/root|/tmp|/usr|/work|/Users|site-packages|[A-Z]:\\)[^\s]*", text)
