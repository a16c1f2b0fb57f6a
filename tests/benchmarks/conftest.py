"""The benchmarks are scripts beside each other, not a package: here they are imported as they import one another."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
