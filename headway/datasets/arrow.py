"""Arrow's compute functions. They are made when pyarrow is imported, so type checkers cannot know them."""

from typing import Any

import pyarrow.compute

compute: Any = pyarrow.compute
