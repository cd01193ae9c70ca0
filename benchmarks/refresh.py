"""Write the tables of README.md and docs/*.md anew from the records in benchmarks/results."""

from pathlib import Path

from forestream.bench.report import refresh

ROOT = Path(__file__).resolve().parents[1]

for document in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
    before = document.read_text()
    after = refresh(before, ROOT / "benchmarks" / "results")
    if after != before:
        document.write_text(after)
        print(f"refreshed {document.relative_to(ROOT)}")
