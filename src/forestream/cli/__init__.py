"""The command line: a file per command."""

from forestream.cli.app import app

__all__ = ["app"]
