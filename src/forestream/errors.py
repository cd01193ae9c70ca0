"""Every error that forestream raises on purpose.

    ForestreamError
    ├── ConfigError          a setting is unknown, out of range or contradicts another
    ├── UnsupportedModel     the host cannot be driven exactly; says which ones can
    ├── CheckpointError      an adapter folder is missing, corrupt, or made for another base
    ├── DataError            rows are missing or not of the expected form
    ├── PromptError          a prompt is empty, leaves no room before the context limit, or is a chat without a template
    ├── GrammarError         a text left its grammar, or the grammar allows no further token
    ├── CacheError           a layer wrote another number of slots than the pass announced
    ├── PrecisionWarning     warned, not raised: the base is held in another precision than the adapter was trained on
    └── AcceptanceWarning    warned, not raised: not one of many drafts was accepted

Messages say what was found, what was expected and what to do.
"""


class ForestreamError(Exception):
    """Base class: catch this to catch everything that forestream raises on purpose."""


class ConfigError(ForestreamError, ValueError):
    """A setting is unknown, out of range or contradicts another."""


class UnsupportedModel(ForestreamError):
    """The host model cannot be driven exactly."""


class CheckpointError(ForestreamError):
    """An adapter folder is missing, corrupt, or was made for another base model."""


class DataError(ForestreamError):
    """Rows are missing or not of the expected form."""


class PromptError(ForestreamError, ValueError):
    """A prompt is empty, leaves no room before the context limit, or is a chat for a model without a template."""


class GrammarError(ForestreamError):
    """A text left its grammar, or the grammar allows no further token."""


class CacheError(ForestreamError):
    """A layer wrote another number of slots than the pass announced."""


class PrecisionWarning(ForestreamError, UserWarning):
    """Warned, not raised: the base is held in another precision than the adapter was trained on."""


class AcceptanceWarning(ForestreamError, UserWarning):
    """Warned, not raised: not one of many drafts was accepted."""
