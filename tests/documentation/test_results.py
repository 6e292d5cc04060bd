"""Tables that benchmarks print are stored, shown on a page, and compared."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
from timing import print_header, print_row

print_header("Widths of things")
print_row(["thing", "", "µs", "share"], (10, 6, 10, 8))
for row in ROWS:
    print_row(row, (10, 6, 10, 8))
"""


def run(folder, rows, name="things.py", **environment):
    """A benchmark that prints such rows, in a separate process."""
    script = folder / name
    script.write_text(SCRIPT.replace("ROWS", repr(rows)))
    return subprocess.run(
        [sys.executable, script],
        env={"PYTHONPATH": str(FOLDER), "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        check=True,
        text=True,
    ).stdout


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


OLD = [["a", "x", "1,200 us", "5 MB"], ["a", "x", "10 us", "5 MB"], ["b", "y", "-", "2.0e3 s"]]
NEW = [["a", "x", "1,250 us", "5 MB"], ["a", "x", "20 us", "6 MB"], ["b", "y", "3 us", "1e3 s"]]


@pytest.mark.slow
def test_tables_are_kept_and_those_of_later_runs_take_their_place(benchmarks, tmp_path):
    import compare
    import results

    files = []
    for name, rows in (("old", OLD), ("new", NEW)):
        kept = tmp_path / name
        run(tmp_path, [["z", "", "0", "0"]], BENCHMARK_RESULTS=str(kept))
        printed = run(tmp_path, rows, BENCHMARK_RESULTS=str(kept))
        run(tmp_path, rows, "others.py", BENCHMARK_RESULTS=str(kept))
        assert rows[0][2] in printed
        (file,) = kept.iterdir()
        assert file.name == f"python-{sys.version_info.major}.{sys.version_info.minor}.json"
        files.append(results.read(file))
        assert [t["benchmark"] for t in files[-1]] == ["things", "others"]
        assert files[-1][0]["rows"] == [["thing", "", "µs", "share"], *rows]
        assert files[-1][0]["load"] >= 0.0
        assert re.fullmatch(r"[0-9a-f]{7,}\+?|unknown", files[-1][0]["commit"])
    found = [c for c in compare.changes(*files, more_than=0.1) if c.table == "Widths of things"]
    ratios = [(c.row, c.column, round(c.ratio, 2)) for c in found[: len(found) // 2]]
    assert ratios == [("a x", "µs", 2.0), ("a x", "share", 1.2), ("b y", "share", 0.5)]


def table(python, rows, benchmark="things", title="Widths of things"):
    """What a benchmark has kept."""
    return {
        "benchmark": benchmark,
        "title": title,
        "day": "2026-01-01",
        "versions": {"Python": python, "JAX": "1.0"},
        "machine": "2 cores, cpu",
        "rows": [["thing", "", "µs", "share"], *rows],
    }


def test_a_page_has_the_tables_that_it_names(benchmarks):
    import pages

    measured = [
        table("3.13", NEW),
        table("3.13", NEW[:2], title="Other things"),
        table("3.13", [["c", "z", "7", "8"]], "others"),
    ]
    page = "A\n<!-- measured: {} -->\nstale\n<!-- end -->\nB <!-- end -->\n"

    one = pages.with_tables(page.format("things 1"), measured)
    assert one.startswith("A\n<!-- measured: things 1 -->\nWidths of things: Python 3.13, JAX 1.0")
    assert one.endswith("\n<!-- end -->\nB <!-- end -->\n")
    assert "| a | x | 20 us | 6 MB |\n" in one
    assert "stale" not in one
    assert "Other" not in one
    assert pages.with_tables(one, measured) == one
    assert pages.with_tables(page.format("things"), measured).count("| thing |") == 2

    shorter = page.format("things 1 without share; 20 us")
    shown = [line for line in pages.with_tables(shorter, measured).split("\n") if "|" in line]
    assert shown == ["| thing |  | µs |", "| --- | --- | --- |", *shown[2:]]
    assert shown[2:] == ["| a | x | 1,250 us |", "| b | y | 3 us |"]

    for unknown in ("nothing", "things 3"):
        with pytest.raises(KeyError, match="has kept no table"):
            pages.with_tables(page.format(unknown), measured)


def test_a_table_is_that_of_the_newest_python(benchmarks, monkeypatch, tmp_path):
    import pages

    kept = tmp_path / "benchmarks" / "results"
    kept.mkdir(parents=True)
    only_old = table("3.11", OLD, "others")
    by_python = {"3.11": [table("3.11", OLD), only_old], "3.13": [table("3.13", NEW)]}
    for python, tables in by_python.items():
        (kept / f"python-{python}.json").write_text(json.dumps(tables))
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert pages.kept() == [table("3.13", NEW), only_old]


def test_the_pages_have_what_was_kept(benchmarks):
    import pages

    measured = pages.kept()
    for page in pages.PAGES:
        text = page.read_text()
        assert "<!-- measured: " in text
        assert pages.with_tables(text, measured) == text, f"python benchmarks/pages.py, for {page}"


# Of benchmarks.md: the first columns' names and the script that prints the numbers.
TABLES_BY_HAND = {
    "| run | batch size | wall s |": "accelerator",
}


def test_a_table_is_measured_or_named_with_its_script():
    page = (FOLDER.parent / "docs" / "benchmarks.md").read_text()
    by_hand = re.sub(r"<!-- measured: .*?<!-- end -->", "", page, flags=re.DOTALL)
    heads = re.findall(r"^(\|.*)\n\| ---", by_hand, flags=re.MULTILINE)
    assert len(heads) == len(TABLES_BY_HAND)
    for head, (begin, script) in zip(heads, TABLES_BY_HAND.items(), strict=True):
        assert head.startswith(begin)
        assert (FOLDER / f"{script}.py").exists()
        section = by_hand[: by_hand.index(head)].rindex("\n## ")
        assert f"benchmarks/{script}.py" in by_hand[section:].split("\n## ")[1]


def test_table_names_its_commit_and_load(benchmarks):
    import pages

    found = table("3.13", OLD) | {"commit": "0123abc", "load": 0.2}
    page = "<!-- measured: things -->\n<!-- end -->\n"
    assert "(2026-01-01, commit 0123abc, load average 0.2)" in pages.with_tables(page, [found])


def test_nothing_is_kept_unless_asked_for(tmp_path):
    run(tmp_path, OLD)
    assert [p.name for p in tmp_path.iterdir()] == ["things.py"]


def test_what_is_kept_fits_its_columns():
    for file in (FOLDER / "results").glob("*.json"):
        for table in json.loads(file.read_text()):
            assert {len(row) for row in table["rows"]} == {len(table["rows"][0])}, table["title"]
