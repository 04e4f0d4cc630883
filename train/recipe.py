"""Recipes: the YAML files of settings, and the command line that changes them."""

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ..atomic_files import write_whole
from ..configuration_vanilla_transformer import closest_name
from ..console import LONGEST_VALUE, add_trust_flag, refuse_code, shown
from ..records import read_text
from .config import TrainConfig
from .resuming import by_field

RECIPES = Path(__file__).parent / "recipes"
# of a run, in its folder
RECIPE_FILE = "recipe.yaml"
# characters and levels of a recipe
LONGEST_RECIPE, DEEPEST = 1_000_000, 20
# what a recipe says of each run of it that was measured, under this name
MEASURED = "measured"
MEASURED_FACTS = ("device", "time", "score", "signature", "results")


class _Loader(yaml.SafeLoader):
    """Reads values without a name that stands twice, references and depth.

    The last of two values of a name would win in silence; a few lines of references to references
    stand for more values than memory holds.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._refuse(f"must be without references (& and *), got {event.anchor}", event)
        if self.depth > DEEPEST:
            self._refuse(f"must be at most {DEEPEST} levels deep, got more", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                self._refuse(f"must have text as names, got {shown(key.value)}", key)
            if key.value in seen:
                self._refuse(f"{shown(key.value)} is given twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and len(node.value) > LONGEST_VALUE:
            self._refuse(f"numbers must be shorter, got {shown(node.value)}", node)
        return super().construct_object(node, deep)

    @staticmethod
    def _refuse(problem: str, place: yaml.Event | yaml.Node) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, place.start_mark)


def _parsed(text: str, name: str, kind: str) -> Any:
    """Parse a recipe, or the value of one setting."""
    if len(text) > LONGEST_RECIPE:
        raise ValueError(
            f"{name} must be of at most {LONGEST_RECIPE:,} characters, got {len(text):,}."
        )
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(filter(None, (error.context, error.problem)))
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{name} must be {kind}: {place}{problem}.") from error
    # a date that does not exist, and a character that no text has
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{name} must be {kind}: {' '.join(str(error).split())}.") from error


def recipe_names() -> list[str]:
    """The recipes that come with the package.

    Returns:
        Their names, sorted.
    """
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _recipe_path(recipe: str) -> Path:
    path = Path(recipe) if recipe.endswith((".yaml", ".yml")) else RECIPES / f"{recipe}.yaml"
    if not path.is_file():
        known = recipe_names()
        raise ValueError(
            f"recipe must be a .yaml file or one of {', '.join(known)}, got {recipe!r}."
            + closest_name(recipe, known)
        )
    return path


def recipe_comment(recipe: str) -> list[str]:
    """What a recipe says of itself.

    Args:
        recipe: Name of a recipe of the package, or path of a .yaml file.

    Returns:
        The lines of the comment it begins with; the first says what it reproduces.

    Raises:
        ValueError: If there is no such recipe.
    """
    lines = read_text(_recipe_path(recipe)).splitlines()
    return [
        line.removeprefix("#").strip()
        for line in itertools.takewhile(lambda line: line.startswith("#"), lines)
    ]


def read_recipe_file(recipe: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Read a recipe as it is written.

    Args:
        recipe: Name of a recipe of the package, or path of a .yaml file.

    Returns:
        Its settings, and `MEASURED_FACTS` of each run of it that was measured.

    Raises:
        ValueError: If there is no such recipe, or it holds something else.
    """
    path = _recipe_path(recipe)
    settings = _parsed(read_text(path), f"recipe {path}", "YAML")
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise ValueError(f"recipe {path} must map names to values, got {shown(settings)}.")
    runs = settings.pop(MEASURED, [])
    if not isinstance(runs, list) or not all(map(_is_measured, runs)):
        raise ValueError(
            f"{MEASURED} must be a list of runs, each with {', '.join(MEASURED_FACTS)}, "
            f"got {shown(runs)}."
        )
    return settings, runs


def _is_measured(run: Any) -> bool:
    return isinstance(run, dict) and set(run) == set(MEASURED_FACTS)


def load_config(recipe: str | Path, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """Resolve a run's settings: defaults, then the recipe, then what is given beside it.

    Args:
        recipe: Name of a recipe of the package, or path of a .yaml file.
        overrides: Settings that win over the recipe's; `model` is merged with the recipe's. Here
            and there `dataset` without `name` has none.

    Returns:
        The settings.

    Raises:
        ValueError: If the recipe or a setting is unknown, or a value is refused.
    """
    recipe = str(recipe)
    settings, _ = read_recipe_file(recipe)
    overrides = overrides or {}
    for name in [*settings, *overrides]:
        if name not in TrainConfig.__dataclass_fields__:
            _refuse(str(name))
    if isinstance(settings.get("model"), dict) and isinstance(overrides.get("model"), dict):
        merged = {**by_field(settings["model"]), **by_field(overrides["model"])}
        overrides = {**overrides, "model": merged}
    given = {}
    for part in (settings, overrides):
        # a configuration belongs to its dataset: another dataset has none unless it is named
        given |= {"name": None, **part} if "dataset" in part else part
    config = TrainConfig(**given)
    if config.output_dir is None:
        config.output_dir = str(Path("runs") / Path(recipe).stem)
    return config


def parse_arguments(
    argv: list[str], prog: str = "vanilla_transformer.train"
) -> tuple[TrainConfig, argparse.Namespace]:
    """Read a command line: `RECIPE --field value ... [--resume] [--dry_run]`.

    Args:
        argv: The arguments.
        prog: Name of the command, for its help.

    Returns:
        The settings, and the switches `resume` and `dry_run`.

    Raises:
        ValueError: If the recipe or a flag is unknown, or a value is refused.
    """
    names = recipe_names()
    width = max(map(len, names))
    recipes = "\n".join(f"  {name:{width}}  {recipe_comment(name)[0]}" for name in names)
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        exit_on_error=False,
        epilog=f"recipes:\n{recipes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        default="paper-base",
        help="a .yaml file, or one of those below (%(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument(
        "--dry_run", action="store_true", help="print settings and what to expect, and stop"
    )
    add_trust_flag(parser)
    for known in dataclasses.fields(TrainConfig):
        # as the flag takes it
        is_empty = known.default is dataclasses.MISSING
        default = "" if is_empty else _flag_text(known.default)
        parser.add_argument(
            f"--{known.name}",
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=f"{known.metadata['help']} ({default})".replace("%", "%%"),
        )
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}.") from error
    for argument in unknown:
        if argument.startswith("-"):
            _refuse(argument.lstrip("-").split("=")[0])
        raise ValueError(f"{argument!r} is one argument too many: the recipe is {given.recipe!r}.")
    overrides = {
        name: _text_value(name, text) if _takes_text(name) else _yaml_value(name, text)
        for name, text in vars(given).items()
        if name in TrainConfig.__dataclass_fields__
    }
    config = load_config(given.recipe, overrides)
    if config.has_model_file and not given.trust_remote_code:
        _refuse_code_of_others(given.recipe, config, is_named="model_class" in overrides)
    if given.resume and "output_dir" not in overrides:
        _refuse_other_folder(Path(given.recipe), config)
    return config, given


def _refuse_code_of_others(recipe: str, config: TrainConfig, is_named: bool):
    """Refuse to run a file that the user has not named; a recipe may come from somebody else."""
    path = Path(config.model_class.rpartition(":")[0])
    if is_named and path.is_file():
        return
    if is_named:
        copy = Path(config.output_dir, path.name)
        refuse_code("model_class", f"{copy}, because {path} does not exist")
    refuse_code(recipe, config.model_class)


def _refuse_other_folder(recipe: Path, config: TrainConfig):
    # a run that was moved or copied has its recipe beside it, which names the folder it was in
    folder = recipe.parent
    is_of_a_run = recipe.name == RECIPE_FILE and (folder / "checkpoints").is_dir()
    if is_of_a_run and folder.resolve() != Path(config.output_dir).resolve():
        raise ValueError(
            f"output_dir must be given where a run was moved: {recipe} says {config.output_dir}, "
            f"and lies beside checkpoints in {folder}."
        )


def save_config(config: TrainConfig, path: Path) -> None:
    """Write settings as a recipe that holds all of them.

    Args:
        config: The settings.
        path: The .yaml file to write.
    """
    write_whole(path, recipe_text(config))


def recipe_text(config: TrainConfig) -> str:
    """Settings as a recipe that holds all of them.

    Args:
        config: The settings.

    Returns:
        YAML.
    """
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def _refuse(name: str) -> NoReturn:
    known = list(TrainConfig.__dataclass_fields__)
    raise ValueError(
        f"{name} is not a setting.{closest_name(name, known)} The settings are {', '.join(known)}."
    )


def _takes_text(name: str) -> bool:
    return TrainConfig.__dataclass_fields__[name].type in (str, str | None)


def _flag_text(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _text_value(name: str, text: str) -> str | None:
    is_optional = TrainConfig.__dataclass_fields__[name].type == str | None
    if is_optional and text == str(None):
        raise ValueError(f"{name} must be null where there is to be none, got {text}.")
    return None if text == "null" and is_optional else text


def _yaml_value(name: str, text: str) -> Any:
    return _parsed(text, name, f"a YAML value, got {shown(text)}")
