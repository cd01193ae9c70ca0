"""GSM8K and HumanEval: rendering, the final number, what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from forestream.errors import DataError
from forestream.tasks import Example, get_task
from forestream.tasks.gsm8k import final_number

PROBLEM = {"question": "Tom has 1,000 pens and buys 2. ", "answer": "He has 1,000+2=<<1000+2=1002>>1002.\n#### 1,002"}
FUNCTION = {
    "task_id": "HumanEval/0",
    "prompt": 'def twice(x):\n    """Twice x.\n    """\n',
    "canonical_solution": "    return 2 * x\n",
}


def write(data: Path, folder: str, split: str, rows: list[dict[str, Any]]) -> None:
    (data / folder).mkdir()
    with gzip.open(data / folder / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_gsm8k_is_scored_by_the_final_number(tmp_path: Path) -> None:
    write(tmp_path, "gsm8k", "test", [PROBLEM])
    task = get_task("gsm8k")
    (example,) = task.examples("test", tmp_path)
    assert example.prompt == "Question: Tom has 1,000 pens and buys 2.\nAnswer:"
    assert example.completion.startswith(" He has 1,000+2=")
    assert example.references == ("1002",)
    texts = ["So 7 and 8.\n#### 1002", "It is 1,002.00.", "#### 1003", "none"]
    assert task.score_each(texts, [example] * 4) == {"exact_match": [100.0, 100.0, 0.0, 0.0]}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a #### -12", "-12"),
        ("#### 5 of 9", "5"),
        ("#### none, 3", "3"),
        ("1 then 2.50.", "2.5"),
        ("$3,000", "3000"),
        ("100", "100"),
        ("#### 1 #### 2", "2"),
        ("no", None),
    ],
)
def test_the_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == number


def test_gsm8k_asks_the_hub_for_its_main_part(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load(*names: str, **options: str) -> list[dict[str, str]]:
        calls.append((names, options))
        return [PROBLEM]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(get_task("gsm8k").examples("train")) == 1
    assert calls == [(("openai/gsm8k", "main"), {"split": "train"})]


def test_a_problem_without_a_number_is_named(tmp_path: Path) -> None:
    write(tmp_path, "gsm8k", "test", [PROBLEM, PROBLEM | {"answer": "It is 7."}])
    with pytest.raises(DataError, match="row 2 of gsm8k has an answer without a number behind ####"):
        get_task("gsm8k").examples("test", tmp_path)


def test_humaneval_runs_no_code(tmp_path: Path) -> None:
    write(tmp_path, "humaneval", "test", [FUNCTION])
    task = get_task("humaneval")
    assert task.examples("test", tmp_path) == [
        Example('def twice(x):\n    """Twice x.\n    """', " return 2 * x", ("return 2 * x",))
    ]
    with pytest.raises(DataError, match="code of the model to be run, which is not done"):
        task.score(["return 2 * x"], task.examples("test", tmp_path))


@pytest.mark.parametrize(("name", "split"), [("gsm8k", "validation"), ("humaneval", "train")])
def test_splits_that_there_are_not(name: str, split: str) -> None:
    with pytest.raises(DataError, match=f"found split '{split}' of {name}"):
        get_task(name).examples(split)


def test_real_problems_and_functions(data_dir: Path) -> None:
    problems = get_task("gsm8k").examples("test", data_dir)
    assert len(problems) == 1319
    assert all(one.references[0].lstrip("-").replace(".", "").isdigit() for one in problems)
    assert len(get_task("humaneval").examples("test", data_dir)) == 164
