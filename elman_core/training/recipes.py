"""Recipes by name: a path, or one that an installed package ships in its folder `recipes`. Finding one imports no plugin."""

from __future__ import annotations

from pathlib import Path

from elman_core.registry import ConfigError, did_you_mean, package_folders

_OWN = Path(__file__).parent.parent / "recipes"


def folders() -> list[Path]:
    """The folders `recipes` of the core, of packages with commands and of plugins; some may not exist."""
    packages = dict.fromkeys((*package_folders("elman.commands"), *package_folders()))
    return [_OWN, *(folder / "recipes" for folder in packages)]


def shipped() -> dict[str, Path]:
    """Recipes that come with the core and with installed plugins, by name."""
    return {path.stem: path for folder in folders() for path in sorted(folder.glob("*.toml"))}


def find_recipe(what: str) -> Path | None:
    """The recipe that `what` means: a path to a .toml file, or a shipped name; None if it is neither, and so a variant.
    Raises `ConfigError` for a .toml file that does not exist, or a file that is not a recipe."""
    recipes = shipped()
    if not what.endswith(".toml"):
        is_path = ("." in what or "/" in what) and ":" not in what  # no variant has such a name
        if what not in recipes and is_path:
            raise ConfigError(f"{what} is {_mistaken(Path(what))}")
        return recipes.get(what)
    path = Path(what).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no recipe {what}.{did_you_mean(path.stem, recipes)} Shipped: {', '.join(recipes)}")
    return path


def _mistaken(path: Path) -> str:
    """Return the kind of a path that is not a recipe, and what to do with it."""
    if path.is_file():
        return f"a file, not a recipe (.toml): give a text with --data, as in elman train NAME --data {path}"
    if (path / "manifest.json").is_file():
        return f"a run: continue it with elman resume {path}"
    if (path / "config.json").is_file() or str(path).startswith("pretrained/"):
        return f"a trained model: to begin with it, elman train --init {path} --data FILE"
    return "neither a variant nor a recipe (.toml)" + (", but a folder" if path.is_dir() else "") + ": see elman list"
