"""Lets tests import the examples by the names that the scripts use."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))
