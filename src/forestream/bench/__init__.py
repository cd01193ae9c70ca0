"""Measuring methods against plain decoding, interleaved in one run."""

from typing import Final

PLAIN: Final = "plain"
"""The baseline's name in every record. Kept here: reports of records load no model library."""
