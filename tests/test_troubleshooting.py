"""Messages and the troubleshooting page agree; every message has a fix and an entry."""

import re
from collections import defaultdict

import pytest

from numpyro_sgmcmc import troubleshooting
from tests.message_catalog import (
    CATALOG,
    ROOT,
    collect_messages,
    collect_plain_raises,
    format_catalog,
)

PAGE = ROOT / "docs" / "troubleshooting.md"
MAX_PROBLEM_LENGTH = 120
NUM_DISTINCT_WORDS = 5
UNEXPLAINED = "Messages whose fix needs no explanation"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="there is no troubleshooting page")


@pytest.fixture(scope="module")
def messages():
    return collect_messages()


def test_messages_have_a_fix_and_an_entry(messages):
    assert len(messages) > 100
    incomplete = [m.location for m in messages if not (m.problem and m.fix and m.entries)]
    assert not incomplete, "\n".join(incomplete)


# Errors that the package catches itself, or whose text another message includes.
INTERNAL_RAISES = (
    "raise KeyError(name)",
    "raise ValueError(f'a checkpoint has no",
    "raise ValueError(f'{qualified_name} is no named tuple",
    "raise ValueError('the checksum of an array differs",
    "raise TypeError(f'A {type(tree).__name__} cannot be stored",
    "raise ValueError('The program has too many constants",
    "raise OSError(f'its file had",
    "raise TypeError('it returns complex numbers",
    "raise TypeError(f'it returns {step_size.dtype}",
)


def test_errors_of_the_package_have_a_message_of_the_catalogue():
    plain = [p for p in collect_plain_raises() if not any(r in p for r in INTERNAL_RAISES)]
    assert not plain, "\n".join(plain)


def test_messages_state_the_problem_briefly(messages):
    long = [m.location for m in messages if m.constant_length > MAX_PROBLEM_LENGTH]
    assert not long, "\n".join(long)


def test_messages_end_with_a_full_stop(messages):
    unfinished = [m.location for m in messages if m.fix and m.fix[-1] not in ".?)}"]
    unfinished += [m.location for m in messages if m.problem[-1:] not in {".", "}"}]
    assert not unfinished, "\n".join(unfinished)


def test_entries_of_messages_are_those_of_the_page(messages):
    entries = {entry for m in messages for entry in m.entries}
    labels = re.findall(r"^\(([a-z0-9-]+)\)=$", PAGE.read_text(), re.MULTILINE)
    assert sorted(labels) == sorted(entries)


def test_sections_that_messages_name_are_those_of_the_page():
    """The site's search finds a section by its title."""
    section_by_label, labels = {}, []
    for line in PAGE.read_text().splitlines():
        if label := re.fullmatch(r"\(([a-z0-9-]+)\)=", line):
            labels.append(label[1])
        elif title := re.fullmatch(r"### (.+)", line):
            section_by_label |= dict.fromkeys(labels, title[1].replace("`", ""))
            labels = []
    assert UNEXPLAINED in section_by_label.values()
    explained = {k: v for k, v in section_by_label.items() if v != UNEXPLAINED}
    assert explained == troubleshooting._SECTION_BY_ENTRY


def test_warnings_begin_with_different_words(messages):
    problems = defaultdict(set)
    for m in messages:
        if m.is_warning:
            problems[tuple(m.problem.split()[:NUM_DISTINCT_WORDS])].add(m.problem)
    alike = ["\n".join(texts) for texts in problems.values() if len(texts) > 1]
    assert not alike, "\n\n".join(alike)


def test_messages_are_those_of_the_golden_file(messages):
    """Regenerate it with ``python tests/message_catalog.py --write`` where a change is meant."""
    assert format_catalog(messages) == CATALOG.read_text()
