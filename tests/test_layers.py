"""Data flows one way: a folder imports only folders before it."""

import ast
from pathlib import Path

import pytest

import autobd

ORDER = [
    *("errors", "interrupts", "tables", "hardware", "cluster", "graph", "blocks", "recipe", "ranks", "parts", "costs"),
    *("checkpoints", "planner", "program", "runtime", "training", "report", "distilled", "api"),
]
PACKAGE = Path(autobd.__file__).parent


def imported(path):
    """Top-level parts of the package that a file imports."""
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("part", ORDER)
def test_imports_go_one_way(part):
    files = sorted((PACKAGE / part).glob("*.py")) if (PACKAGE / part).is_dir() else [PACKAGE / f"{part}.py"]
    assert files
    for file in files:
        allowed = {*ORDER[: ORDER.index(part)], part}
        assert set(imported(file)) <= allowed, file
