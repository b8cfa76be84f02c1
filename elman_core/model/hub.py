"""How a checkpoint finds this package: `auto_map` in config.json and a file of one import beside the weights."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from elman_core.registry import StorageError

SHIM_NAME = "modeling_ladder_hub"

# Transformers reads the imports of this file before it runs it, and names the package to install if it is not there.
SHIM = '''"""The classes of this checkpoint live in the package elman-core: pip install elman-core

config.json names under "made_with" the packages of the variants it needs.
"""

from elman_core import (  # noqa: F401
    LadderConfig,
    LadderForCausalLM,
    LadderForSequenceClassification,
    LadderForTokenClassification,
    LadderModel,
)
'''

AUTO_MAP = {
    "AutoConfig": f"{SHIM_NAME}.LadderConfig",
    "AutoModel": f"{SHIM_NAME}.LadderModel",
    "AutoModelForCausalLM": f"{SHIM_NAME}.LadderForCausalLM",
    "AutoModelForSequenceClassification": f"{SHIM_NAME}.LadderForSequenceClassification",
    "AutoModelForTokenClassification": f"{SHIM_NAME}.LadderForTokenClassification",
}


def write_shim(folder: str | os.PathLike) -> None:
    """Write the shim into `folder`; make the folder if it is missing."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{SHIM_NAME}.py").write_text(SHIM, encoding="utf-8")


def push(folder: str | os.PathLike, repo: str, private: bool = False) -> str:
    """Upload a checkpoint folder to the hub as `repo`, which is made if it is missing. Returns its address.

    Raises:
        StorageError: no network, no permission, or no such name.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=Path(folder), commit_message="Upload of a model")
    except Exception as error:  # of the client, of the library below it (which has changed), or of the network
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        later = shlex.join(["hf", "upload", repo, str(folder), ".", *(["--private"] if private else [])])
        raise StorageError(f"cannot push to {repo}: {first}; the folder is complete, push it with: {later}") from error
    return str(address)
