"""What the warm-up finds that makes a posterior wrong whatever the chains say: kept for the
report.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ModelWarning"]


class ModelWarning(NamedTuple):
    """
    - **sites** - names of the sites that are concerned; empty for all.
    - **kind** - ``"hidden"``: the potential changes unknown to its gradient; ``"modes"``: there are
      other modes of comparable mass; ``"visited"``: there are, and chains start in them, too;
      ``"no region"``: pilot chains agree nowhere; ``"coupled"``: rows do not add up.
    - **message** - what is wrong, and the way out.
    """

    sites: tuple[str, ...]
    kind: str
    message: str
