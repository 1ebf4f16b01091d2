"""The platform: catalog, artifacts, datasets, features. It imports no Dagster.

For notebooks and scripts: `headway.open()` gives what a home holds as Arrow tables and data frames.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.reading import Reader


def open(home: Path | str | None = None) -> Reader:  # noqa: A001 - `headway.open()` is what people type
    """Open a home for reading; without `home` the one that the settings name (`HEADWAY_HOME`, else `.headway`).

    Raises:
        NoHome: nothing was ever kept there.
    """
    from headway.reading import open_reader

    return open_reader(home)
