"""Formulas as MathML, written when the site is built: browsers draw it without any script."""

import re

from docutils import nodes
from latex2mathml.converter import convert

# Spaces as in TeX: around a relation, none around a slash, none after the minus of a negative
# number, and after a logarithm without parentheses.
SPACES = {
    "<mi>&#x0007E;</mi>": "<mo>&#x0223C;</mo>",
    "<mo>&#x0002F;</mo>": '<mo lspace="0" rspace="0">&#x0002F;</mo>',
    r"<mi>log</mi>(?!<mo[^>]*>&#x00028;)": r'<mi>log</mi><mspace width="0.17em" />',
    r"(<mo[^>]*>&#x000(?:28|3D|5B);</mo>)<mo>&#x02212;</mo>": r'\1<mo form="prefix">&#x02212;</mo>',
}


def _convert(formula, **options):
    mathml = convert(formula, **options)
    for pattern, replacement in SPACES.items():
        mathml = re.sub(pattern, replacement, mathml)
    return mathml


def _inline(writer, node):
    writer.body.append(_convert(node.astext()))
    raise nodes.SkipNode


def _block(writer, node):
    formula = node.astext()
    if r"\\" in formula:
        formula = rf"\begin{{split}}{formula}\end{{split}}"
    html = _convert(formula, display="block")
    writer.body.append(f'<div class="math" tabindex="0">{html}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
