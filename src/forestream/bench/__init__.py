"""Measuring methods against plain decoding, interleaved in one run."""
