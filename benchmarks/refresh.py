"""Write the tables of README.md and docs/*.md anew from the records in benchmarks/results."""

from pathlib import Path

from forestream.bench.paper import filled
from forestream.bench.report import refresh

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "results"

for document in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
    before = document.read_text()
    after = filled(refresh(before, RECORDS), RECORDS)
    if after != before:
        document.write_text(after)
        print(f"refreshed {document.relative_to(ROOT)}")
