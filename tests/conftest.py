"""What every test gets: no network, a fixed seed, and real data sets only where they are asked for."""

import os

# Before anything imports the hub's client, which reads this once.
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("oracle")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--data-dir",
        type=Path,
        default=None,
        help="folder that holds the data sets' folders; without it, tests that need real data are skipped",
    )
    parser.addoption("--soak", type=int, default=300, help="requests that the soak test sends to one model")


@pytest.fixture
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The folder given with --data-dir; without one, the test is skipped."""
    folder: Path | None = request.config.getoption("--data-dir")
    if folder is None:
        pytest.skip("needs real data sets: give their folder with --data-dir")
    if not folder.is_dir():
        pytest.skip(f"needs real data sets: there is no folder {folder}")
    return folder


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> int:
    """How many requests the soak test sends."""
    number: int = request.config.getoption("--soak")
    return number


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
    return 0


@pytest.fixture(autouse=True)
def as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands compile nothing by themselves in tests; whoever asks for it still gets it."""
    from forestream.cli import options

    chosen = options.compile_how

    def how(form: options.CompileForm) -> str:
        return chosen(options.CompileForm.off if form == options.CompileForm.auto else form)

    monkeypatch.setattr(options, "compile_how", how)
