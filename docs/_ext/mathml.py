"""Formulas as MathML, written when the site is built: browsers draw it without any script."""

from docutils import nodes
from latex2mathml.converter import convert


def _inline(writer, node):
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(writer, node):
    formula = node.astext()
    if r"\\" in formula:
        formula = rf"\begin{{split}}{formula}\end{{split}}"
    html = convert(formula, display="block")
    writer.body.append(f'<div class="math" tabindex="0">{html}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
