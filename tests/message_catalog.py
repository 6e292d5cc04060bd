"""All error messages and warnings of the package, collected from its source.

``python tests/message_catalog.py --write`` writes them to ``tests/messages.txt``, which a test
compares with the source: a changed message is a changed line of that file.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "numpyro_sgmcmc"
CATALOG = ROOT / "tests" / "messages.txt"

_ERROR_PARAMETERS = ("problem", "fix", "entry")
_ERROR_BASE = "ExplainedError"
_WARNING_CALLS = "warn_user", "PendingWarning"


class Message(NamedTuple):
    """A message as the source builds it.

    - **path** - file, relative to the repository.
    - **line** - line of the call.
    - **function** - name of the function that makes it.
    - **kind** - error class; category of a warning; ``format_message``.
    - **is_warning** - whether it is a warning.
    - **problem** - text with ``{expression}`` for what is inserted.
    - **fix** - likewise; empty where there is none.
    - **entries** - labels of the troubleshooting page, of which the call uses one.
    - **constant_length** - number of characters of the problem that are not inserted.
    """

    path: str
    line: int
    function: str
    kind: str
    is_warning: bool
    problem: str
    fix: str
    entries: tuple[str, ...]
    constant_length: int

    @property
    def location(self) -> str:
        return f"{self.path}:{self.line} ({self.function})"


def collect_messages() -> list[Message]:
    """Return the messages of all files, in the order of the source."""
    trees = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    error_classes = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and _ERROR_BASE in map(ast.unparse, node.bases)
    }
    # Callable that makes a message -> its parameters, in order.
    parameters = dict.fromkeys({*error_classes, "format_message"}, _ERROR_PARAMETERS)
    parameters |= dict.fromkeys(_WARNING_CALLS, ("message", "category", "fix", "entry"))
    return [m for path, tree in trees.items() for m in _collect(tree, path, parameters)]


def collect_plain_raises() -> list[str]:
    """Return the places that raise a builtin error without a message of the catalogue."""
    places = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            name, arguments = ast.unparse(node.exc.func), node.exc.args
            is_message = arguments and ast.unparse(arguments[0]).startswith("format_message(")
            is_builtin = isinstance(getattr(builtins, name, None), type)
            if is_builtin and name != "NotImplementedError" and not is_message:
                places.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)[:90]}")
    return places


def _collect(
    node: ast.AST,
    path: str,
    parameters: dict[str, tuple[str, ...]],
    function: str = "module",
    scope: ast.AST | None = None,
    in_model_warning: bool = False,
) -> Iterator[Message]:
    """Yield the messages below a node.

    :param parameters: parameters of the callables that make messages.
    :param function: name of the innermost function or class.
    :param scope: innermost function, whose local variables may hold parts of a message.
    :param in_model_warning: whether the node is an argument of ``ModelWarning``, which the warm-up
        shows as a warning.
    """
    for child in ast.iter_child_nodes(node):
        child_function, child_scope, is_inside = function, scope, in_model_warning
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            child_function = child.name if function == "module" else f"{function}.{child.name}"
            child_scope = child if isinstance(child, ast.FunctionDef) else scope
        elif isinstance(child, ast.Call):
            name = getattr(child.func, "id", getattr(child.func, "attr", ""))
            if name in parameters and not _passes_parameters_on(child, scope):
                arguments = dict(zip(parameters[name], child.args, strict=False))
                arguments |= {k.arg: k.value for k in child.keywords if k.arg}
                yield _read_call(child, name, arguments, path, function, scope, in_model_warning)
            is_inside = is_inside or name == "ModelWarning"
        yield from _collect(child, path, parameters, child_function, child_scope, is_inside)


def _passes_parameters_on(call: ast.Call, scope: ast.AST | None) -> bool:
    """Return whether a call passes on a message that was made elsewhere."""
    if not call.args:
        return False
    first = call.args[0]
    if isinstance(first, ast.Starred) or getattr(first, "attr", "") == "message":
        return True
    parameters = {a.arg for a in scope.args.args} if isinstance(scope, ast.FunctionDef) else set()
    return isinstance(first, ast.Name) and first.id in parameters


def _read_call(
    call: ast.Call,
    name: str,
    arguments: dict[str, ast.expr],
    path: str,
    function: str,
    scope: ast.AST | None,
    in_model_warning: bool,
) -> Message:
    arguments["problem"] = arguments.get("problem", arguments.get("message"))
    parts = {
        part: list(_render(arguments[part], scope)) if arguments.get(part) is not None else []
        for part in ("problem", "fix")
    }
    entry = arguments.get("entry")
    entries = [
        node.value
        for node in (ast.walk(entry) if entry is not None else ())
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    category = arguments.get("category")
    return Message(
        path=path,
        line=call.lineno,
        function=function,
        kind=name if category is None else ast.unparse(category),
        is_warning=name in _WARNING_CALLS or in_model_warning,
        problem="".join(text for text, _ in parts["problem"]),
        fix="".join(text for text, _ in parts["fix"]),
        entries=tuple(entries),
        constant_length=sum(len(text) for text, is_constant in parts["problem"] if is_constant),
    )


def _render(node: ast.AST, scope: ast.AST | None) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a string expression, each with whether it is constant."""
    if isinstance(node, ast.Constant):
        yield str(node.value), True
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                yield f"{{{ast.unparse(value.value)}}}", False
            else:
                yield from _render(value, scope)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _render(node.left, scope)
        yield from _render(node.right, scope)
    elif isinstance(node, ast.Name) and (value := _find_value(node.id, scope)) is not None:
        yield from _render(value, None)
    else:
        yield f"{{{ast.unparse(node)}}}", False


def _find_value(name: str, scope: ast.AST | None) -> ast.AST | None:
    """Return the string that a local variable is assigned, if there is one assignment only."""
    if scope is None:
        return None
    values = [
        node.value
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
    ]
    is_string = len(values) == 1 and isinstance(values[0], (ast.JoinedStr, ast.Constant))
    return values[0] if is_string else None


def format_catalog(messages: list[Message]) -> str:
    """Return the text of the golden file."""
    blocks = [
        f"{m.path}: {m.function}\n"
        f"  {m.kind}: {m.problem}\n"
        f"  Fix: {m.fix}\n"
        f"  See: {', '.join(m.entries)}\n"
        for m in messages
    ]
    return "\n".join(blocks)


if __name__ == "__main__":
    text = format_catalog(collect_messages())
    if "--write" in sys.argv[1:]:
        CATALOG.write_text(text)
    else:
        print(text)
