"""A recipe's training with plain heads in place of streams: the same joint loss, a simpler architecture.

    .venv/bin/python benchmarks/plain_heads.py --recipe e2e --data-dir data --output heads-adapter examples=1200

The LoRA is trained together with G heads, G and the weights of the terms being the recipe's: head j is a residual block
and the model's own head on the final state, and learns the tokens that stream j would. Examples and their order are the
recipe's. Written are an adapter without streams and, inside its folder, the heads (medusa/): `forestream bench
--adapter A --medusa A/medusa`. An interrupted run goes on when it is started again.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from forestream import checkpoint, provenance, recipes
from forestream.bases import fingerprint, load_base
from forestream.data import drawn, template_of, tokenize
from forestream.manifest import BaseModel
from forestream.rivals.medusa import MedusaConfig, MedusaHeads
from forestream.rivals.medusa_folder import save_heads
from forestream.rivals.medusa_training import HeadsObjective
from forestream.tasks import get_task
from forestream.training import fit, training_model


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="e2e")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="adapter folder to write")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE, as for forestream train")
    given = parser.parse_args(arguments)
    made = provenance.collect(arguments, program="benchmarks/plain_heads.py")
    checkpoint.check_output(given.output)
    recipe = recipes.Recipe.from_dict(recipes.overridden(recipes.read(given.recipe), given.overrides), given.recipe)
    recipe = replace(recipe, training=recipe.training.on("cpu"))
    twin = replace(recipe.streams, streams=0)
    rows = get_task(recipe.task).examples("train", given.data_dir)
    host, tokenizer = load_base(recipe.base, getattr(torch, recipe.training.dtype))
    template = template_of(tokenizer, rows)
    origin = BaseModel(recipe.base, host.config.model_type, fingerprint(host), recipe.training.dtype, template)
    examples = [tokenize(tokenizer, row) for row in drawn(rows, recipe.training.seed, recipe.examples)]
    torch.manual_seed(recipe.training.seed)
    model = training_model(host, twin)
    heads = MedusaHeads.fresh(MedusaConfig(recipe.streams.streams, "shared"), model)
    run = given.output.parent / f"{given.output.name}.run"
    objective = HeadsObjective(model, heads, recipe.loss)
    report = fit(
        model, examples, tokenizer.eos_token_id, run, recipe.training, recipe.loss, resume=True, objective=objective
    )
    record = {**made, "task": recipe.task, "recipe": recipe.values(), "stream": asdict(twin), **report}
    checkpoint.save(model, given.output, origin, record)
    save_heads(heads, given.output / "medusa", given.output, {**record, "parameters": heads.added})


if __name__ == "__main__":
    main(sys.argv[1:])
