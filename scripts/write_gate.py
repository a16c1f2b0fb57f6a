"""Write the numbers that tests/test_gate.py compares: of all short runs and plans, or of those with these names.

    python scripts/write_gate.py                      # all: about 15 CPU minutes, most of them plans
    python scripts/write_gate.py grpo llama tiny/full

A commit that changes these files says why the numbers moved.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import gate


def main(names: list[str]) -> None:
    if unknown := set(names) - {*gate.CURVES, *gate.PLANS}:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}. Expected {', '.join([*gate.CURVES, *gate.PLANS])}")
    for file, cases, measure in (("curves", gate.CURVES, gate.run), ("plans", gate.PLANS, gate.plan)):
        for name in cases:
            if not names or name in names:
                with tempfile.TemporaryDirectory() as folder:
                    os.environ["LEAN_FT_CACHE"] = f"{folder}/cache"
                    found = measure(name, Path(folder))
                gate.write(file, gate.read(file) | {name: found})
        gate.write(file, {name: numbers for name, numbers in gate.read(file).items() if name in cases})


if __name__ == "__main__":
    main(sys.argv[1:])
