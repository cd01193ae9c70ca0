"""`forestream inspect`: an adapter's parts, and what its drafts look like pass by pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from forestream.cli import loading, options
from forestream.cli.demo import PROMPTS
from forestream.cli.output import write_json
from forestream.cli.summary import summary, summary_table
from forestream.cli.writing import ACCEPTED, OWN, PRUNED, coloured, figures, heading
from forestream.writing import Writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forestream.generation import Generation, Generator
    from forestream.steps import Counters, Step

_TICK, _CROSS, _ARROW = "✓", "✗", "→"


def inspect_adapter(
    adapter: options.Adapter,
    prompt: Annotated[
        str, typer.Option(help="What to write after.", show_default="facts about a made-up restaurant")
    ] = PROMPTS[0],
    passes: Annotated[
        int, typer.Option("--passes", min=0, help="Draw the draft trees of the first so many passes; 0 draws none.")
    ] = 4,
    base: options.Base = None,
    settings: options.Settings = None,
    tree: options.Tree = None,
    nodes: options.Nodes = None,
    k: options.K = None,
    streams: options.Streams = None,
    carriers: options.Carriers = None,
    carried: options.Carried = None,
    lookup_beside: options.LookupBeside = None,
    lookup_behind: options.LookupBehind = None,
    prune_below: options.PruneBelow = None,
    prune_to: options.PruneTo = None,
    max_new_tokens: options.MaxNewTokens = None,
    dtype: options.DTypeName = options.DType.auto,
    quantise: options.QuantiseHow = options.QuantiseForm.off,
    device: options.Device = "cpu",
    json_file: options.JsonFile = None,
) -> None:
    """Look into an adapter: what it is made of, and what it drafts for a prompt.

    First a summary of the folder, every parameter accounted for. Then a prompt is written out, and the draft tree of
    each pass is drawn: accepted drafts green, the main stream's own token yellow, pruned branches struck out, the rest
    was rejected. Last the sums over all passes.

    --json writes: summary, prompt, text, passes (each with its tree as parents and token ids, and its verdict),
    figures, and what it was run with.

    Example: forestream inspect --adapter adapters/e2e --prune-below 0.1 --passes 2
    """
    dtype = options.dtype_on(device, dtype)
    decoding = options.settings_from(
        options.tuned(settings, adapter, dtype, device, options.CompileForm.off, quantise) if settings else None,
        tree=tree,
        nodes=nodes,
        k=k,
        streams=streams,
        carriers=carriers,
        carried=carried,
        lookup_beside=lookup_beside,
        lookup_behind=lookup_behind,
        prune_below=prune_below,
        prune_to=prune_to,
        max_new_tokens=max_new_tokens,
    )
    generator = loading.load_generator(adapter, base, dtype, decoding, device, quantise=quantise)
    console = Console(highlight=False)
    about = summary(adapter, generator.model)
    console.print(summary_table(about, generator.model))
    with Console(stderr=True).status("writing"):
        generation = generator.generate(prompt)
    console.print(_legend(prompt))
    for number, step in enumerate(generation.steps[: passes + 1]):
        console.print(_pass(generator.tokenizer, number, step))
    if hidden := max(len(generation.steps) - 1 - passes, 0):
        console.print(f"\n{hidden} more passes are not drawn; --passes {passes + hidden} draws all", style="dim")
    console.print(_text(generator, generation))
    console.print(_sums(generation.counters))
    if json_file is not None:
        write_json(json_file, {**heading(adapter, generator), "summary": about, **_record(prompt, generation)})


def _legend(prompt: str) -> Text:
    return Text.assemble(
        ("\nprompt  ", "bold"),
        prompt,
        ("\nnodes   ", "bold"),
        (f"{_TICK} accepted", ACCEPTED),
        "   rejected   ",
        (f"{_CROSS} pruned", PRUNED),
        "   ",
        (f"{_ARROW} the main stream's own", OWN),
    )


def _pass(tokenizer: PreTrainedTokenizerBase, number: int, step: Step) -> Tree | Text:
    """A headline, and under it the draft tree with its verdict."""
    wrote = ", ".join(_shown(tokenizer, token) for token in step.tokens)
    if step.tree is None:
        return Text.assemble(("\nprompt pass", "bold"), ": wrote ", (wrote, OWN))
    topology, tokens = step.tree.topology, step.tree.tokens
    offered, kept = len(topology), len(step.kept)
    headline = (
        f": {offered} nodes{f', {kept} after pruning' if kept < offered else ''}; "
        f"accepted {step.accepted} of at most {step.offered_depth}, wrote {wrote}"
    )
    surviving, accepted = set(step.kept), step.path[: step.accepted + 1]
    branches: list[Tree] = []
    for node, parent in enumerate(topology.parents):
        text = _shown(tokenizer, tokens[node])
        if node in accepted[1:]:
            text, style = f"{text} {_TICK}", ACCEPTED
        elif node not in surviving:
            text, style = f"{text} {_CROSS}", PRUNED
        else:
            style = "default"
        label = Text.assemble((f"{node} ", "dim"), (text, style))
        branches.append(branches[parent].add(label) if node else Tree(label, guide_style="dim"))
    for own in step.tokens[step.accepted :]:
        branches[accepted[-1]].add(Text.assemble((f"{_ARROW} {_shown(tokenizer, own)}", OWN)))
    whole = Tree(Text.assemble((f"\npass {number}", "bold"), headline), hide_root=False, guide_style="dim")
    whole.add(branches[0])
    return whole


def _shown(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token's text in quotes, or its raw form where it is a part of a character."""
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if "\N{REPLACEMENT CHARACTER}" in text:
        text = tokenizer.convert_ids_to_tokens(token)
    return repr(text)


def _text(generator: Generator, generation: Generation) -> Text:
    writing = Writing(generator.text)
    pieces = [piece for step in generation.steps for piece in writing.add(step)]
    return Text.assemble(("\ntext", "bold"), "\n", coloured(pieces), "\n")


def _sums(counters: Counters) -> Table:
    table = Table(title="all passes", title_style="bold", title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("generated tokens", f"{counters.generated}, of them {counters.accepted} drafted and accepted")
    table.add_row("passes", f"{counters.passes} after the prompt pass")
    table.add_row("call reduction", f"{counters.call_reduction:.2f} tokens per pass")
    table.add_row(
        "mean acceptance length", f"{counters.mean_acceptance_length:.2f} = 1 + {counters.accepted} / {counters.passes}"
    )
    shares = _by_stream(counters.acceptance_by_position)
    table.add_row(
        "accepted by position", f"{shares} of all passes that drafted so far" if shares else "nothing was drafted"
    )
    if shares:
        given = _by_stream(counters.acceptance_given_previous)
        table.add_row("given the previous", f"{given} of those whose drafts before it were accepted")
    table.add_row("nodes per pass", f"{counters.nodes_per_pass:.1f}")
    return table


def _by_stream(shares: list[float]) -> str:
    return ", ".join(f"stream {j} {share:.0%}" for j, share in enumerate(shares, start=1))


def _record(prompt: str, generation: Generation) -> dict[str, Any]:
    """Every pass, with token ids and node numbers."""
    return {
        "prompt": prompt,
        "text": generation.text,
        "passes": [
            {
                "parents": step.tree.topology.parents,
                "tokens": step.tree.tokens,
                "kept": step.kept,
                "accepted_path": step.path[: step.accepted + 1],
                "wrote": step.tokens,
                "seconds": round(step.seconds, 6),
            }
            for step in generation.steps
            if step.tree is not None
        ],
        "figures": figures(generation.counters),
    }
