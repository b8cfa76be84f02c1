"""Sum up the verifications of a day with a GPU: python benchmarks/verified.py DAY [--out FILE] [--commit HASH]

DAY is the folder of `benchmarks/gpu_day.py`: verify-*.log and summary.json. For each kernel and dtype: cases, and for every
output and gradient the case closest to its limit. Leaves with 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from machine import commit
from tables import markdown

HERE = Path(__file__).parent
HEAD = ["kernel", "dtype", "tensor", "error", "error of the reference", "limit", "error / limit", "closest case"]


def reports(log: str) -> list[dict[str, Any]]:
    """What `elman verify --json` printed; warnings may stand before it.

    Raises:
        ValueError: there is none.
    """
    start = re.search(r"^\[", log, re.MULTILINE)
    if start is None:
        raise ValueError(f"no report: {log.strip().splitlines()[-1:]}")
    found: list[dict[str, Any]] = json.JSONDecoder().raw_decode(log[start.start() :])[0]
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: a row for each kernel, dtype and tensor."""
    worst: dict[tuple[str, str, str], dict[str, Any]] = {}
    for report in found:
        for row in report["rows"]:
            key = report["name"], row["dtype"], row["tensor"]
            if key not in worst or row["ratio"] > worst[key]["ratio"]:
                worst[key] = row
    rows = [HEAD]
    for (name, dtype, tensor), r in worst.items():
        figures = [f"{r[k]:.1e}" for k in ("error", "reference", "limit")]
        rows.append([name, dtype, tensor, *figures, f"{r['ratio']:.2f}", r["case"]])
    return markdown(rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("day", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "verify_h200.md")
    parser.add_argument("--commit", default=commit())
    given = parser.parse_args(arguments)
    facts = json.loads((given.day / "summary.json").read_text())
    found = [r for log in sorted(given.day.glob("verify-*.log")) for r in reports(log.read_text(errors="replace"))]
    summed = [
        f"{r['name']} {r['rows'][0]['dtype'] if r['rows'] else ''} {r['cases']} cases{'' if r['passed'] else ' FAILED'}"
        for r in found
    ]
    lines = [
        f"`elman verify --grid full`: {facts['gpu']}, torch {facts['torch']}, commit {given.commit}. {'; '.join(summed)}.",
        "",
        "Relative L2 errors against float64; the reference is plain PyTorch in the same dtype. Two calls agree in every bit.",
        "",
        table(found),
        *(f"\n**{fault}**" for r in found for fault in r["faults"]),
    ]
    given.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[:1]))
    return 0 if found and all(r["passed"] for r in found) else 1


if __name__ == "__main__":
    sys.exit(main())
