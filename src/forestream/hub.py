"""Adapters on a model hub: fetched by name, sent without anything that is not theirs."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Final

from forestream.checkpoint import FILES, copy_adapter
from forestream.errors import CheckpointError
from forestream.manifest import MANIFEST

_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")


def find(adapter: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The folder of an adapter: a local one, or else the hub's repository of that name, fetched once.

    Args:
        adapter: a folder, or "owner/name".
        revision: branch, tag or commit on the hub.

    Raises:
        CheckpointError: there is no such folder, and the hub gives no adapter of that name.
    """
    folder = Path(adapter)
    if folder.exists() or not _NAME.fullmatch(str(adapter)):
        return folder
    import huggingface_hub

    try:
        fetched = huggingface_hub.snapshot_download(
            str(adapter), revision=revision, token=token, allow_patterns=list(FILES)
        )
    except Exception as error:  # the hub client raises network errors of several libraries
        line = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"no adapter folder at {adapter}, and the hub gave none of that name ({type(error).__name__}: {line}); "
            "give a folder that `forestream train` wrote, or check name and network"
        ) from error
    if not (Path(fetched) / MANIFEST).is_file():
        raise CheckpointError(f"{adapter} on the hub holds no {MANIFEST}; it is no adapter of forestream")
    return Path(fetched)


def push(
    adapter: Path,
    repo_id: str,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "An adapter of forestream",
    create_pr: bool = False,
) -> str:
    """Send an adapter's own files to the hub's repository `repo_id`, which is made if it is not there.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: the folder is no complete adapter.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    # Out of a folder that holds nothing else: what lies beside an adapter, such as settings for one machine, stays.
    with tempfile.TemporaryDirectory() as aside:
        whole = Path(aside) / "adapter"
        copy_adapter(adapter, whole)
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        sent = api.upload_folder(
            repo_id=made.repo_id,
            folder_path=whole,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
        )
    return str(sent.commit_url)
