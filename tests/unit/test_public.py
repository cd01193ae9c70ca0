"""What the package shows: its names, loaded on first use, and the exception tree, drawn as it is in the code."""

import inspect
import re
import subprocess
import sys

import pytest

import forestream
from forestream import errors
from forestream.errors import ConfigError, ForestreamError, PromptError

CLASSES = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls)}


# --- names ----------------------------------------------------------------------------------------------------


def test_the_public_names() -> None:
    """A name that goes or comes is a change for users: it belongs into the changelog."""
    assert sorted(forestream.__all__) == [
        "Counters",
        "DecodeSettings",
        "ForestreamError",
        "Generation",
        "Generator",
        "Grammar",
        "Memory",
        "Request",
        "SamplingSettings",
        "Schedule",
        "Step",
        "StreamConfig",
    ]


@pytest.mark.parametrize("name", forestream.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    found = getattr(forestream, name)
    assert found.__name__ == name
    assert found.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Generatorr'"):
        _ = forestream.Generatorr


def test_importing_the_package_loads_no_model_library() -> None:
    script = "import sys, forestream; print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# --- errors ---------------------------------------------------------------------------------------------------


def test_the_docstring_draws_the_tree_that_the_code_defines() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^\s+(?:[├└]── )?([A-Z]\w+)(?:  |$)", errors.__doc__, re.MULTILINE)
    assert drawn[0] == "ForestreamError"
    assert sorted(drawn) == sorted(CLASSES)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_can_be_caught_as_ours(name: str) -> None:
    assert CLASSES[name].__doc__
    with pytest.raises(ForestreamError, match="found this"):
        raise CLASSES[name]("found this")


def test_wrong_values_are_value_errors_too() -> None:
    also = {name for name, cls in CLASSES.items() if issubclass(cls, ValueError)}
    assert also == {ConfigError.__name__, PromptError.__name__}


def test_no_error_hides_an_error_of_python() -> None:
    assert not set(CLASSES) & set(vars(__import__("builtins")))
