"""Speculative Streaming: a language model that drafts its own next tokens in the pass that checks the last ones."""

__version__ = "0.1.0"
