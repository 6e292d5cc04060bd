"""Fashion-MNIST, digits that are no clothes, and rows of tables, each in three parts.

Fashion-MNIST (60,000 images and 10,000 to test on) is in the Debian package
``dataset-fashion-mnist``. It is looked for where that is installed, then in ``numpyro-sgmcmc`` in
``$XDG_CACHE_HOME`` or ``~/.cache``, and else ``apt-get download`` brings it there, without root.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import franzese2021_data
import numpy as np
import zhang2017_data

INSTALLED = Path("/usr/share/datasets/fashion-mnist")
FILES = [
    f"{part}-{what}-ubyte.gz"
    for part in ("train", "t10k")
    for what in ("images-idx3", "labels-idx1")
]
SIDE = 28


class Data(NamedTuple):
    """
    - **x** - to learn from, shape ``(n, inputs)``.
    - **y** - numbers, or classes from 0 on, shape ``(n,)``.
    - **x_test** - to test on.
    - **y_test** - likewise.
    - **x_other** - of another kind than both, or None.
    - **unit** - what one unit of y is in the table's own.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    x_other: np.ndarray | None = None
    unit: float = 1.0

    def held_out(self, share: float = 0.1, seed: int = 0) -> Data:
        """The rows to learn from alone, some of which are now those to test on."""
        order = np.random.default_rng(seed).permutation(len(self.x))
        test, train = np.split(order, [round(share * len(order))])
        return Data(self.x[train], self.y[train], self.x[test], self.y[test], None, self.unit)


def table(name: str, seed: int) -> Data:
    """A random split of Boston, Concrete, Diabetes or a made-up one, standardised by the rows to
    learn from.
    """
    if name == "Made up":
        rng = np.random.default_rng(0)
        x = rng.uniform(-2, 2, (200, 2))
        y = np.sin(2 * x[:, 0]) * x[:, 1] + 0.3 * rng.standard_normal(200)
        rows = franzese2021_data.Table(x, y, 150, 1.0)
    elif name == "Diabetes":
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True)
        rows = franzese2021_data.Table(x, y, round(0.9 * len(y)), 1.0)
    else:
        rows = franzese2021_data.load(name)
    found = franzese2021_data.split(rows, seed)
    x, y, x_test, y_test = (np.asarray(v, np.float32) for v in found[:4])
    return Data(x, y, x_test, y_test, None, found.unit)


def fashion(
    num: int | None = None,
    side: int = SIDE,
    folder: Path | None = None,
    has_others: bool = False,
) -> Data:
    """Images of clothes; pixels less their mean, of SD one over all.

    :param num: images to learn from, the first ones. Default: all 60,000.
    :param side: of an image in pixels, which are means of squares of those in the files.
    :param folder: of the four files.
    :param has_others: whether there are images of digits as others.
    """
    folder = folder or _folder()
    x, y, x_test, y_test = (read(folder / name) for name in FILES)
    images = [x[:num], x_test, *([zhang2017_data.all_digits()[0]] if has_others else [])]
    images = [_shrink(image, side) for image in images]
    center = images[0].mean(0)
    unit = (images[0] - center).std()
    x, x_test, *others = ((v - center) / unit for v in images)
    digits = others[0] if others else None
    return Data(x, y[:num].astype(np.int32), x_test, y_test.astype(np.int32), digits)


def _shrink(images: np.ndarray, side: int) -> np.ndarray:
    """Pixels from 0 to 1, shape ``(n, side**2)``."""
    fold = SIDE // side
    squares = images.reshape(-1, side, fold, side, fold).astype(np.float32)
    return squares.mean((2, 4)).reshape(-1, side**2) / np.float32(255)


def made_up(num: int, seed: int = 0) -> Data:
    """Three classes separated by two inputs, and rows far from all of them: a check of the code."""
    parts = zhang2017_data.made_up_classes(num, seed)
    far = np.random.default_rng(seed).uniform(-3, 3, (50, 2)).astype(np.float32)
    return Data(*parts, far)


def read(file: Path) -> np.ndarray:
    """Bytes of an IDX file, in its shape."""
    content = gzip.decompress(file.read_bytes())
    shape = np.frombuffer(content, ">i4", content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _folder() -> Path:
    """Return the folder of the four files; download them if necessary."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = home / "numpyro-sgmcmc" / "fashion-mnist"
    for folder in (INSTALLED, kept):
        if all((folder / name).exists() for name in FILES):
            return folder
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        try:
            for command in ("apt-get download dataset-fashion-mnist", "dpkg-deb -x *.deb ."):
                subprocess.run(
                    command, shell=True, check=True, capture_output=True, cwd=place, timeout=300
                )
        except subprocess.SubprocessError:
            raise SystemExit(
                "Fashion-MNIST comes by `apt-get download dataset-fashion-mnist`, which must work, "
                f"or its four files lie in {kept}."
            ) from None
        for name in FILES:
            shutil.copy(Path(place) / INSTALLED.relative_to("/") / name, kept)
    return kept
