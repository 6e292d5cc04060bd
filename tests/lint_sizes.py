"""Whether no function of the package has over 80 lines, and no file over 400: for `make lint`."""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "numpyro_sgmcmc"
LONGEST_FUNCTION, LONGEST_FILE = 80, 400


def too_long(path: Path) -> list[str]:
    """What is too long in a file, a line each."""
    text = path.read_text()
    name = path.relative_to(PACKAGE.parent)
    found = []
    if (length := len(text.splitlines())) > LONGEST_FILE:
        found.append(f"{name}:1: the file has {length} lines, over {LONGEST_FILE}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min(line.lineno for line in (node, *node.decorator_list))
            if (length := node.end_lineno - first + 1) > LONGEST_FUNCTION:
                found.append(
                    f"{name}:{first}: `{node.name}` has {length} lines, over {LONGEST_FUNCTION}"
                )
    return found


if __name__ == "__main__":
    offenders = [line for path in sorted(PACKAGE.rglob("*.py")) for line in too_long(path)]
    print(*offenders, sep="\n", end="\n" if offenders else "")
    sys.exit(1 if offenders else 0)
