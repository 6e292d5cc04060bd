"""Experiments in parts, which several processes may run: the numbers of each part in a file."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Parts(NamedTuple):
    """Where the numbers of parts are stored.

    - **folder** - of the files. None: nothing is stored.
    - **prefix** - of the files' names, by the size of the experiment.
    - **is_join** - whether only stored numbers are used.
    """

    folder: Path | None = None
    prefix: str = ""
    is_join: bool = False

    def file(self, name: str) -> Path | None:
        return self.folder and self.folder / f"{self.prefix}-{name}"

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the stored numbers of a part, or compute and store them.

        If only stored numbers are used and there are none, return None.
        """
        file = self.file(f"{name}.json")
        if file and file.exists():
            return json.loads(file.read_text())
        if self.is_join:
            return None
        start = time.process_time()
        found = compute()
        print(name, found, f"{time.process_time() - start:.0f} s of CPU", flush=True)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found))
        return found


def arguments(
    description: str | None, data: Sequence[str], **choices: Sequence[str]
) -> tuple[argparse.Namespace, Parts]:
    """Return the options of the command line and where parts are stored.

    :param data: the data sets.
    :param choices: names of other options, and the values that may be chosen for each.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small part of everything")
    parser.add_argument("--full", action="store_true", help="of the paper's size (hours)")
    for name, values in {"data": data, **choices}.items():
        parser.add_argument(
            f"--{name}", nargs="+", choices=values, default=values, metavar=name.upper(),
            help=f"some of {', '.join(values)} (all)",
        )  # fmt: skip
    parser.add_argument("--splits", nargs="+", type=int, help="seeds of random splits")
    parser.add_argument("--folder", type=Path, help="of stored numbers, not computed again")
    parser.add_argument("--join", action="store_true", help="print what the folder has")
    options = parser.parse_args()
    options.size = "QUICK" if options.quick else "PAPER" if options.full else "DEFAULT"
    return options, Parts(options.folder, options.size.lower(), options.join)
