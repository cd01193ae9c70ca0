"""Prompts out of files, each with the place it came from, so that errors can name it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

from forestream.errors import PromptError
from forestream.tasks.base import Message, user

JSON_LINES: Final = ".jsonl"


class Prompt(NamedTuple):
    """A prompt and where it stands, such as "line 3 of prompts.txt"; of the form "chat" it is what a user says."""

    text: str
    where: str
    form: Literal["text", "chat"] = "text"

    @property
    def asked(self) -> str | list[Message]:
        """The prompt as `forestream.data.prompt_ids` takes it."""
        return [user(self.text)] if self.form == "chat" else self.text


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a text file, one per line, or of JSON lines (.jsonl) with a key "prompt"; blanks are skipped.

    Raises:
        PromptError: the file cannot be read, a line is not of the expected form, or there is no prompt.
    """
    try:
        data = file.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise PromptError(f"{file} cannot be read ({error.strerror}); expected a file of prompts") from error
    except UnicodeDecodeError as error:
        at = data.count(b"\n", 0, error.start) + 1
        raise PromptError(f"line {at} of {file} is no UTF-8 text ({error.reason}); save the file as UTF-8") from error
    parse = _of_json if file.suffix.lower() == JSON_LINES else str
    prompts = []
    for number, line in numbered_lines(text):
        where = f"line {number} of {file}"
        try:
            prompts.append(Prompt(parse(line), where))
        except ValueError as error:
            raise PromptError(
                f'{where} {error}; expected one JSON object a line, such as {{"prompt": "some text"}}'
            ) from error
    if not prompts:
        raise PromptError(f"found no prompt in {file}; expected one per line")
    return prompts


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    # Not splitlines(): prompts may hold form feeds and other rare separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _of_json(line: str) -> str:
    """The value of "prompt".

    Raises:
        ValueError: it is not there, or is no text; the message goes on from the line's number.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError(f"holds a {type(row).__name__}")
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'has {prompt!r} under the key "prompt"' if "prompt" in row else 'has no key "prompt"')
    return prompt
