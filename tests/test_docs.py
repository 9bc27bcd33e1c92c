"""What the documents name is there: tests, files, arguments, options."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import autobd
from autobd.cli import main

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def functions(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_trouble_page_names_exists():
    rows = [row for row in (ROOT / "docs/trouble.md").read_text().splitlines() if re.match(r"\| \d", row)]
    assert len(rows) >= 53
    for row in rows:
        named, defined = 0, set()
        for word in re.findall("`([^`]*)`", row):
            if re.fullmatch(r"tests/\S*\.py", word):
                defined = functions(ROOT / word)
            elif word.startswith("test_"):
                assert word in defined, word
                named += 1
        assert named, row


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_files_that_a_document_names_exist(document):
    text = document.read_text()
    for path in re.findall(r"\b(?:examples|docs|tests)/[\w/]+\.(?:py|md)", text):
        assert (ROOT / path).exists(), path


def test_the_readmes_commands_have_their_options(capsys):
    for name, options in re.findall(r"^    autobd (\w+)(.*)", (ROOT / "README.md").read_text(), re.M):
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert set(re.findall(r"--[\w-]+", options)) <= set(re.findall(r"--[\w-]+", capsys.readouterr().out)), options


def test_the_readmes_calls_have_their_arguments():
    text = (ROOT / "README.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        for call in (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            if name.startswith("autobd."):
                taken = inspect.signature(getattr(autobd, name.removeprefix("autobd."))).parameters
                assert {word.arg for word in call.keywords} <= set(taken), ast.unparse(call)
