"""Recipes: everything that one training is, in a file that people can read.

    forestream train --recipe e2e --output my-adapter
    forestream train --recipe my-recipe.yaml --output my-adapter training.learning_rate=5e-4 streams.stream_layers=8

A recipe names a task, a base, a mode and perhaps a number of examples, and has a section for each of `StreamConfig`
(`streams:`), `TrainConfig` (`training:`) and `LossConfig` (`loss:`). What it leaves out is as by default; what nobody
knows is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Self

import yaml

from forestream.config import JsonConfig, StreamConfig, one_of, whole
from forestream.errors import ConfigError
from forestream.objective import LossConfig
from forestream.training import TrainConfig

Values = dict[str, Any]
"""A recipe as it stands in a file: values by key, and of the sections mappings of such."""

SECTIONS: Final[dict[str, type[JsonConfig]]] = {"streams": StreamConfig, "training": TrainConfig, "loss": LossConfig}


@dataclass(frozen=True)
class Recipe:
    """One training, whole.

    Attributes:
        task: what is learned, by the name that `forestream train --task` takes.
        base: the base model: a hub name, a folder, or smollm2-135m.
        examples: how many examples are used, at random; None uses all.
        start_from: adapter folder whose weights the run begins with; None begins with fresh ones.
        streams: shape of the streams and of the adapters. A recipe's `mode` stands beside its task, not in there.
        training: how it is trained.
        loss: weights of the terms.
        expected: what a recorded run came to: losses and accuracies by their names in the log, seconds, and where
            the record is. For readers; nothing is made of it.
    """

    task: str
    base: str = "smollm2-135m"
    examples: int | None = None
    start_from: str | None = None
    streams: StreamConfig = field(default_factory=StreamConfig)
    training: TrainConfig = field(default_factory=TrainConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    expected: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _text("task", self.task)
        _text("base", self.base)
        if self.examples is not None:
            whole("examples", self.examples, 1)
        if self.start_from is not None:
            _text("start_from", self.start_from)
        if not isinstance(self.expected, Mapping):
            raise ConfigError(f"expected is {self.expected!r}; expected keys with values")

    @property
    def mode(self) -> str:
        """joint or lossless."""
        return self.streams.mode

    def values(self) -> Values:
        """As a file would hold it, nothing left out; `from_dict` makes the same recipe of it."""
        values = asdict(self)
        mode = values["streams"].pop("mode")
        return {"task": values.pop("task"), "base": values.pop("base"), "mode": mode, **values}

    @classmethod
    def from_dict(cls, values: Values, source: str = "recipe") -> Self:
        """Build from what a file holds.

        Args:
            source: what errors call it.

        Raises:
            ConfigError: a key is unknown or the task is missing, or a value has a wrong type or is out of range.
        """
        _check_keys(values, source)
        given = dict(values)
        if "task" not in given:
            raise ConfigError(f"{source} names no task; expected task: NAME, or --task NAME")
        mode = given.pop("mode", "joint")
        try:
            one_of("mode", mode, ("joint", "lossless"))
            for section, kind in SECTIONS.items():
                own = given.get(section, {})
                given[section] = kind.from_dict({**own, "mode": mode} if section == "streams" else own)
            return cls(**given)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name} is {value!r}; expected a text")


def known(section: str | None = None) -> list[str]:
    """The keys of a section, or of the top of a recipe."""
    if section is not None:
        return sorted(one.name for one in fields(SECTIONS[section]) if (section, one.name) != ("streams", "mode"))
    return sorted({one.name for one in fields(Recipe)} | {"mode"})


def _check_keys(values: Values, source: str) -> None:
    """Raises:
    ConfigError: a key at the top or in a section is unknown, or a section is no mapping.
    """
    parts: list[tuple[str | None, Values]] = [(None, values)]
    for section in SECTIONS:
        if not isinstance(own := values.get(section, {}), dict):
            raise ConfigError(f"{source}: {section} is {own!r}; expected keys with values: {', '.join(known(section))}")
        parts.append((section, own))
    for name, part in parts:
        if unknown := sorted(str(key) for key in part if key not in known(name)):
            where = f" in {name}" if name else ""
            hint = " (mode stands beside task)" if unknown == ["mode"] else ""
            raise ConfigError(
                f"{source}: unknown key {', '.join(unknown)}{where}{hint}; known are {', '.join(known(name))}"
            )


# --- files ------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML's plain types only; a key that stands twice is an error, and 1e-3 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found the key {name} twice; expected it once", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


# Without a dot, PyYAML takes a number with an exponent for a text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(
        entry.name.removesuffix(".yaml") for entry in files(__name__).iterdir() if entry.name.endswith(".yaml")
    )


def read(recipe: str) -> Values:
    """What a recipe's file holds, keys checked, values not yet.

    Args:
        recipe: the name of one that comes with the package, or the path of a file.

    Raises:
        ConfigError: there is no such recipe, or it is no YAML, or keys are unknown or stand twice.
    """
    path = Path(recipe)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{recipe} cannot be read as UTF-8 text: {error}") from error
    elif recipe in names():
        text = (files(__name__) / f"{recipe}.yaml").read_text(encoding="utf-8")
    else:
        raise ConfigError(
            f"found no recipe {recipe!r}; expected the path of a YAML file, or one of {', '.join(names())}"
        )
    values = _parsed(text, recipe)
    if not isinstance(values, dict):
        raise ConfigError(f"{recipe} holds a {type(values).__name__}; expected keys with values: {', '.join(known())}")
    _check_keys(values, recipe)
    return values


def changed(values: Values, key: str, value: Any) -> Values:
    """`values` with another value at `key`, in which a dot separates a section's name from its key.

    Raises:
        ConfigError: the key is unknown.
    """
    section, dot, name = key.rpartition(".")
    if dot and section not in SECTIONS:
        raise ConfigError(f"{key} names the section {section!r}; expected one of {', '.join(SECTIONS)}")
    if name not in known(section if dot else None) or (not dot and name in SECTIONS):
        within = f"{section}." if dot else ""
        choices = [f"{within}{one}" for one in known(section if dot else None) if dot or one not in SECTIONS]
        raise ConfigError(f"unknown key {key}; known are {', '.join(choices)}")
    return {**values, section: {**values.get(section, {}), name: value}} if dot else {**values, name: value}


def overridden(values: Values, changes: Sequence[str]) -> Values:
    """`values` changed by texts such as training.learning_rate=5e-4, whose right sides are YAML.

    Raises:
        ConfigError: a text is no key=value, its key is unknown, or its value is no YAML.
    """
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign:
            raise ConfigError(f"found {change!r}; expected KEY=VALUE, such as training.learning_rate=5e-4")
        values = changed(values, key.strip(), _parsed(value, change))
    return values


def _parsed(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source} is no YAML that can be read: {problem}{where}") from error
