"""Write what llama.cpp's converter writes for the tests' folders, into tests/gguf/converter_facts.json.

    LLAMA_CPP=path/to/llama.cpp python scripts/make_converter_facts.py

Prints each case with the differences of an export, and exits with 1 if the converter failed or a difference has no
reason.
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lean_ft.export import export_gguf  # noqa: E402
from tests.gguf.converter import FACTS, JUDGED, convert, differences, facts_of, unexplained, write_folder  # noqa: E402


def main() -> int:
    found, num_wrong = {}, 0
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        jobs = {case: (write_folder(case, place / f"{i}"), place / f"{i}.gguf") for i, case in enumerate(JUDGED)}
        errors = convert(jobs, place / "errors.json")
        for case, (folder, file) in jobs.items():
            if case in errors:
                print(f"{case}: the converter fails: {errors[case].strip().splitlines()[-1]}")
                num_wrong += 1
                continue
            found[case] = facts_of(file)
            export_gguf(folder, place / "own.gguf", "f32", force=True)
            different = differences(facts_of(place / "own.gguf"), found[case])
            wrong = unexplained(case, different)
            num_wrong += len(wrong)
            keys = ", ".join(one.partition(": ")[0] for one in different)
            print(f"{case}: {found[case]['architecture']}, " + (f"other: {keys}" if different else "equal"))
            for one in wrong:
                print(f"    no reason for {one}")
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(facts)}" for case, facts in found.items())
    FACTS.write_text(f"{{\n{lines}\n}}\n")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
