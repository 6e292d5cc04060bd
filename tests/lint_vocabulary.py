"""List words of the retired private vocabulary: ``python tests/lint_vocabulary.py [FILE ...]``.

Names, docstrings, comments, messages and pages are searched. A line ends with ``# vocabulary: ok``
(in a page: ``<!-- vocabulary: ok -->``) where a listed word has its ordinary meaning. The summaries
of docstrings are checked as well: those of functions begin with a verb.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Retired word -> the term of the field.
RETIRED = {
    r"told|tells?|telling": "report, estimate, show",
    r"midst": "bulk of the posterior",
    r"(?<![Ff]unnel[ _])necks?": "funnel neck",
    r"by volume": "variational initialisation",
    r"houses?|rooms?": "package layout, subpackage",
    r"hotter|colder|(?<!one )hot|heats?|heated": "kinetic temperature, variance inflation",
    r"of its own|of their own|of one's own": "separate",
    r"to be had": "available",
    r"mends?|mended": "fix",
    r"as ever": "as before",
    r"weighed|weighs?": "compared, estimated",
    r"stand-?ins?|stand_ins?": "proxy",
    r"forgets?|forgotten|forgot": "clear, discard",
    r"goes? furthest": "highest efficiency",
    r"suits|suitable": "",
    r"rows that decide|decisive": "influential observations",
    r"(?:do(?:es)? not )?add up": "additive",
    r"says? what|saying": "",
    r"nothing is looked for": "",
    r"in a sentence|in sentences": "",
    r"beside other work": "on a loaded machine",
    r"same bits": "bitwise reproducible",
    r"refus(?:e|es|ed|al|als|ing)": "raise, check, not supported",
    r"anchors?|anchored": "reference, center",
    r"whiten(?:ing|ings|ed|s)?|unwhitened|whitens": "preconditioner, preconditioned",
    r"verdicts?": "diagnosis",
    r"cures?": "remedy",
    r"no region|regions? of none": "non-identified posterior",
    r"witness(?:es)?": "bias estimate",
    r"bends?": "tail transform",
    r"plain gradients?": "minibatch gradient",
    r"excess(?:es)?": "variance inflation, sd inflation",
    r"mean[ _]shifts?|shifts? of (?:a |the )?means?": "mean bias",
    r"schemes?": "integrator, subsampling",
    r"findings?": "model warning",
    r"clip_gradient|target_bias|chains_in_modes|collect_locals": "see the changelog",
    r"(?<!num_)gibbs_sweeps": "keep_locals, num_gibbs_sweeps",
    r"sds|sd(?=[ ,.;:)])": "SD, SDs",
    r"\d %": "5%, without a blank",
    r"[«»]": "quotation marks",
}
# Patterns for prose only: as names of variables and sites these words are ordinary.
PROSE_ONLY = (r"sds|sd(?=[ ,.;:)])", r"\d %", r"[«»]")
_SEPARATED = r"(?<![A-Za-z_])(?:{})(?![A-Za-z_])"
_PROSE = re.compile(_SEPARATED.format("|".join(f"(?:{w})" for w in RETIRED)))
_NAMES = re.compile(_SEPARATED.format("|".join(f"(?:{w})" for w in RETIRED if w not in PROSE_ONLY)))
_STRING_TOKENS = {
    getattr(tokenize, name)
    for name in ("STRING", "FSTRING_START", "FSTRING_MIDDLE")
    if hasattr(tokenize, name)
}
_OK = re.compile(r"vocabulary: ok")
_BAD_SUMMARY = re.compile(
    r"^(?:That|Of|What|Where|Whether|The same|How|Which|It|They|If|With|From|At|By|In|On|As|For)\b"
)
_NOUN_SUMMARY = re.compile(r"^(?:The|A|An|One|All|Each|Some|Two|No)\b")
_SKIPPED = {"CHANGELOG.md", "lint_vocabulary.py"}


def searched_files() -> list[Path]:
    """List tracked Python files and pages."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "Makefile", "pyproject.toml"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.split() if Path(name).name not in _SKIPPED]


def texts_of_code(source: str) -> Iterator[tuple[int, str, re.Pattern]]:
    """Yield line number, text and pattern of each name, comment and string of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string.replace("_", " "), _NAMES
        elif token.type == tokenize.COMMENT:
            yield token.start[0], token.string, _PROSE
        elif token.type in _STRING_TOKENS:
            for number, line in enumerate(token.string.split("\n"), token.start[0]):
                yield number, line, _PROSE if " " in line.strip() else _NAMES


def texts_of_page(source: str) -> Iterator[tuple[int, str, re.Pattern]]:
    """Yield line number, text and pattern of each line of a page."""
    is_code = False
    for number, line in enumerate(source.split("\n"), 1):
        if line.startswith("```"):
            is_code = not is_code
        if is_code:
            yield number, line, _NAMES
        if is_code or re.fullmatch(r"\([a-z0-9-]+\)=", line):  # the label of a section
            continue
        for k, part in enumerate(line.split("`")):  # every other part is a code span
            yield number, part.replace("_", " ") if k % 2 else part, _NAMES if k % 2 else _PROSE


def find_words(path: Path) -> list[str]:
    """List the retired words of one file, a line each."""
    source = path.read_text()
    lines = source.split("\n")
    texts = texts_of_code(source) if path.suffix == ".py" else texts_of_page(source)
    found = []
    for number, text, pattern in texts:
        if _OK.search(lines[number - 1]):
            continue
        for match in pattern.finditer(text):
            word = next(w for w in RETIRED if re.compile(w).match(text, match.start()))
            instead = f" (use: {RETIRED[word]})" if RETIRED[word] else ""
            found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()!r}{instead}")
    return found


def find_bad_summaries(path: Path) -> list[str]:
    """List docstrings whose first line is neither a verb phrase nor a plain noun phrase."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
            continue
        summary = (ast.get_docstring(node) or "").split("\n")[0]
        is_property = isinstance(node, ast.FunctionDef) and any(
            "property" in ast.dump(d) for d in node.decorator_list
        )
        is_function = isinstance(node, ast.FunctionDef) and not is_property
        if _BAD_SUMMARY.match(summary) or (is_function and _NOUN_SUMMARY.match(summary)):
            line = getattr(node, "lineno", 1)
            found.append(f"{path.relative_to(ROOT)}:{line}: summary {summary[:60]!r}")
    return found


def main() -> None:
    """Print what was found, and fail where there is any."""
    files = [Path(name).resolve() for name in sys.argv[1:]] or searched_files()
    found = [line for path in files for line in find_words(path)]
    found += [
        line
        for path in files
        if path.suffix == ".py" and "numpyro_sgmcmc" in path.relative_to(ROOT).parts
        for line in find_bad_summaries(path)
    ]
    print("\n".join(found))
    if found:
        sys.exit(f"{len(found)} uses of the private vocabulary")


if __name__ == "__main__":
    main()
