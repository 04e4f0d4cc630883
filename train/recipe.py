"""Recipes: the YAML files of settings, and the command line that changes them."""

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ..atomic_files import write_atomically
from ..configuration_vanilla_transformer import VanillaTransformerConfig, closest_name
from ..console import LONGEST_VALUE, TRUST, add_trust_flag, refuse_code, shown
from ..records import read_text
from .config import TrainConfig, by_canonical_name

RECIPES_FOLDER = Path(__file__).parent / "recipes"
# name of the recipe in a run folder
RECIPE_FILE = "recipe.yaml"
# largest number of characters, and of nested levels, in a recipe
MOST_CHARACTERS, MOST_LEVELS = 1_000_000, 20
# entry of a recipe that lists its measured runs
MEASURED_RUNS = "measured"
TRAIN_DESCRIPTION = "Train a recipe, from raw text to averaged weights."
# flag for a preview of a run, and its values: by default the preview only computes, the other one
# trains a few steps
DRY_RUN_FLAG, COMPUTED_PREVIEW, MEASURED_PREVIEW = "--dry_run", "computed", "measured"
# names of fields of the model
MODEL_FIELDS = {
    *VanillaTransformerConfig.__annotations__,
    *VanillaTransformerConfig.attribute_map,
}
# for settings of other trainers, the setting with the same purpose
NAMES_ELSEWHERE = {
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), "tokens_per_step"),
    **dict.fromkeys(("beam", "beams", "beam_size"), "num_beams"),
    **dict.fromkeys(("lr", "learning_rate"), "learning_rate_factor"),
    **dict.fromkeys(("epochs", "max_epoch", "max_epochs", "num_train_epochs"), "max_steps"),
}
# facts that a recipe contains about each measured run
MEASURED_FACTS = ("device", "time", "score", "signature", "results")


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses repeated names, references, deep nesting and unusual numbers.

    The loader of PyYAML would silently use the last of two values with the same name, and expand a
    few lines of nested aliases to more values than fit into memory.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._refuse_yaml(f"must be without references (& and *), got {event.anchor}", event)
        if self.depth > MOST_LEVELS:
            self._refuse_yaml(f"must be at most {MOST_LEVELS} levels deep, got more", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        names_so_far = set()
        for name_node, _ in node.value:
            if name_node.tag != "tag:yaml.org,2002:str":
                self._refuse_yaml(
                    f"must have text as names, got {shown(name_node.value)}: put other words into "
                    "quotes",
                    name_node,
                )
            if name_node.value in names_so_far:
                self._refuse_yaml(f"{shown(name_node.value)} is given twice", name_node)
            names_so_far.add(name_node.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and len(node.value) > LONGEST_VALUE:
            self._refuse_yaml(f"numbers must be shorter, got {shown(node.value)}", node)
        # YAML 1.1 reads 010 as 8, and 1:30 as 90
        if is_number and re.match(r"[-+]?0\d|.*:", node.value):
            self._refuse_yaml(
                f"numbers must have no 0 in front and no colon, got {shown(node.value)}: write a "
                "decimal number, or put text into quotes",
                node,
            )
        return super().construct_object(node, deep)

    @staticmethod
    def _refuse_yaml(problem: str, node: yaml.Event | yaml.Node) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _parse_yaml(text: str, subject: str, expected: str) -> Any:
    """Parse a recipe, or the value of one setting."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"{subject} must be of at most {MOST_CHARACTERS:,} characters, got {len(text):,}."
        )
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(filter(None, (error.context, error.problem)))
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{subject} must be {expected}: {position}{problem}.") from error
    # for an invalid date PyYAML raises a ValueError, for an invalid character another YAMLError
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"{subject} must be {expected}: {' '.join(str(error).split())}."
        ) from error


def recipe_names() -> list[str]:
    """List the recipes of the package.

    Returns:
        Names of the recipes, sorted.
    """
    return sorted(path.stem for path in RECIPES_FOLDER.glob("*.yaml"))


def _recipe_path(recipe: str) -> Path:
    has_yaml_suffix = recipe.endswith((".yaml", ".yml"))
    path = Path(recipe) if has_yaml_suffix else RECIPES_FOLDER / f"{recipe}.yaml"
    if has_yaml_suffix and not path.is_file():
        sibling_recipes = [str(sibling) for sibling in path.parent.glob("*.y*ml")]
        raise ValueError(
            f"the recipe {recipe!r} does not exist.{closest_name(recipe, sibling_recipes)}"
        )
    if not path.is_file():
        names = recipe_names()
        raise ValueError(
            f"recipe must be a .yaml file or one of {', '.join(names)}, got {recipe!r}."
            + closest_name(recipe, names)
        )
    return path


def recipe_comment(recipe: str) -> list[str]:
    """Return the description of a recipe.

    Args:
        recipe: Name of a recipe of the package, or path of a .yaml file.

    Returns:
        Lines of the comment at its beginning; the first one says what the recipe reproduces.

    Raises:
        ValueError: If there is no such recipe.
    """
    lines = read_text(_recipe_path(recipe)).splitlines()
    return [
        line.removeprefix("#").strip()
        for line in itertools.takewhile(lambda line: line.startswith("#"), lines)
    ]


def read_recipe_file(recipe: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Read the settings of a recipe, without defaults.

    Args:
        recipe: Name of a recipe of the package, or path of a .yaml file.

    Returns:
        Settings of the recipe, and `MEASURED_FACTS` of each measured run.

    Raises:
        ValueError: If there is no such recipe, the file is not YAML or does not map names to
            values, the file is empty, or a measured run does not have exactly the facts of
            `MEASURED_FACTS`.
    """
    path = _recipe_path(recipe)
    text = read_text(path)
    if not text.strip():
        raise ValueError(
            f"recipe {path} must have settings, such as dataset, source_lang and target_lang, got "
            "an empty file. `vanilla-transformer new` writes a recipe for a corpus."
        )
    settings = _parse_yaml(text, f"recipe {path}", "YAML")
    # the recipe paper-base has only a comment, because its settings are the defaults
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise ValueError(f"recipe {path} must map names to values, got {shown(settings)}.")
    runs = settings.pop(MEASURED_RUNS, [])
    if not isinstance(runs, list) or not all(map(_has_measured_facts, runs)):
        raise ValueError(
            f"{MEASURED_RUNS} must be a list of runs, each with {', '.join(MEASURED_FACTS)}, "
            f"got {shown(runs)}."
        )
    return settings, runs


def _has_measured_facts(run: Any) -> bool:
    return isinstance(run, dict) and set(run) == set(MEASURED_FACTS)


def load_config(recipe: str | Path, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """Resolve the settings of a run: defaults, then the recipe, then overrides.

    Args:
        recipe: Name of a recipe of the package, or path of a .yaml file.
        overrides: Settings that replace those of the recipe; the fields of `model` are merged with
            the recipe's. If they set `dataset`, the recipe's `name`, `revision` and `columns` do
            not apply.

    Returns:
        The settings.

    Raises:
        ValueError: If the recipe or a setting is unknown, or a value is invalid.
    """
    recipe = str(recipe)
    recipe_settings, _ = read_recipe_file(recipe)
    overrides = overrides or {}
    if isinstance(recipe_settings.get("model"), dict) and isinstance(overrides.get("model"), dict):
        merged_fields = {
            **by_canonical_name(recipe_settings["model"]),
            **by_canonical_name(overrides["model"]),
        }
        overrides = {**overrides, "model": merged_fields}
    if "dataset" in overrides:
        # these settings belong to one dataset, so those of the recipe do not apply
        overrides = {"name": None, "revision": None, "columns": None, **overrides}
    config = config_of({**recipe_settings, **overrides})
    if config.output_dir is None:
        config.output_dir = str(Path("runs") / Path(recipe).stem)
    return config


def config_of(settings: Mapping[str, Any]) -> TrainConfig:
    """Check settings by name.

    Args:
        settings: Values by name; the others have their defaults.

    Returns:
        The settings.

    Raises:
        ValueError: If a setting is unknown, or a value is invalid.
    """
    for name in settings:
        if name not in TrainConfig.__dataclass_fields__:
            _refuse_setting(str(name))
    return TrainConfig(**settings)


def parse_arguments(
    argv: list[str], prog: str = "vanilla_transformer.train", description: str = TRAIN_DESCRIPTION
) -> tuple[TrainConfig, argparse.Namespace]:
    """Read a command line: `RECIPE --field value ... [--resume] [--dry_run [measured]]`.

    Args:
        argv: Command-line arguments.
        prog: Name of the command in the help text.
        description: Text that says what the command does, for its help.

    Returns:
        Settings of the run, and the parsed arguments, such as `resume` and `dry_run`.

    Raises:
        ValueError: If the recipe or a flag is unknown, a value is invalid, the recipe names code
            that is not trusted, or the run to resume has been moved to another folder.
    """
    names = recipe_names()
    width = max(map(len, names))
    recipe_lines = "\n".join(f"  {name:{width}}  {recipe_comment(name)[0]}" for name in names)
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        exit_on_error=False,
        description=description,
        epilog=f"recipes:\n{recipe_lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        default="paper-base",
        help="a .yaml file, or the name of a recipe below (default: %(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint")
    parser.add_argument(
        DRY_RUN_FLAG,
        # `nargs` serves only the help text, because `_attach_dry_run_values` adds the value
        nargs="?",
        choices=[COMPUTED_PREVIEW, MEASURED_PREVIEW],
        metavar=MEASURED_PREVIEW,
        help="print the first pairs, the settings and the expected size and memory, then exit; "
        f"`--dry_run {MEASURED_PREVIEW}` trains a few steps and prints how long the run will take",
    )
    add_trust_flag(parser)
    arguments, overrides = parse_settings(parser, argv, "recipe")
    config = load_config(arguments.recipe, overrides)
    if config.has_model_file and not arguments.trust_remote_code:
        _refuse_untrusted_code(arguments.recipe, config, is_flag_given="model_class" in overrides)
    if arguments.resume and "output_dir" not in overrides:
        _refuse_moved_run(Path(arguments.recipe), config)
    return config, arguments


def parse_settings(
    parser: argparse.ArgumentParser,
    argv: list[str],
    positional: str,
    names: Collection[str] = TrainConfig.__dataclass_fields__,
    required: Collection[str] = (),
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Read a command line with settings as flags.

    Args:
        parser: Parser with the other arguments of the command.
        argv: Command-line arguments.
        positional: Name of the positional argument of the command.
        names: Settings that are flags of the command.
        required: Settings whose default does not apply to the command.

    Returns:
        The parsed arguments, and the settings that are given.

    Raises:
        ValueError: If a flag is unknown, there is an argument too many, or a value cannot be read.
    """
    for name in names:
        field = TrainConfig.__dataclass_fields__[name]
        # the help shows a default in the form that the flag accepts
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        note = "required" if name in required else f"default: {_flag_text(default)}"
        parser.add_argument(
            f"--{name}",
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=f"{field.metadata['help']} ({note})".replace("%", "%%"),
        )
    try:
        arguments, unknown_arguments = parser.parse_known_args(_attach_dry_run_values(argv))
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}.") from error
    for argument in unknown_arguments:
        if argument.startswith("-"):
            _refuse_setting(argument.lstrip("-").split("=")[0], names)
        raise ValueError(
            f"{argument!r} is one argument too many: the {positional} is "
            f"{getattr(arguments, positional)!r}."
        )
    return arguments, {
        name: (_parse_text_value if _is_text_setting(name) else parse_yaml_value)(name, text)
        for name, text in vars(arguments).items()
        if name in names
    }


def _attach_dry_run_values(argv: list[str]) -> list[str]:
    """Give `--dry_run` a value, because argparse would parse the recipe after it as its value."""
    default_argument = f"{DRY_RUN_FLAG}={COMPUTED_PREVIEW}"
    arguments: list[str] = []
    for argument in argv:
        if arguments and arguments[-1] == default_argument and argument == MEASURED_PREVIEW:
            arguments[-1] = f"{DRY_RUN_FLAG}={MEASURED_PREVIEW}"
        else:
            arguments.append(default_argument if argument == DRY_RUN_FLAG else argument)
    return arguments


def _refuse_untrusted_code(recipe: str, config: TrainConfig, is_flag_given: bool):
    """Refuse to run a file that only the recipe names: recipes can come from other people."""
    model_class = config.model_class or ""
    path = Path(model_class.rpartition(":")[0])
    if not is_flag_given:
        refuse_code(recipe, model_class)
    if not path.is_file():
        copy = config.folder / path.name
        consequence = f", so the copy {copy} would be run. {TRUST}" if copy.is_file() else "."
        raise ValueError(f"model_class names {path}, which does not exist{consequence}")


def _refuse_moved_run(recipe: Path, config: TrainConfig):
    # the recipe of a run folder that was moved or copied still names the old folder
    folder = recipe.parent
    is_run_recipe = recipe.name == RECIPE_FILE and (folder / "checkpoints").is_dir()
    if is_run_recipe and folder.resolve() != config.folder.resolve():
        raise ValueError(
            f"output_dir must be given for a run that was moved: {recipe} says "
            f"{config.output_dir}, but its checkpoints are in {folder}."
        )


def save_config(config: TrainConfig, path: Path) -> None:
    """Write all settings as a recipe.

    Args:
        config: Settings of the run.
        path: .yaml file to write.
    """
    write_atomically(path, recipe_text(config))


def recipe_text(config: TrainConfig) -> str:
    """Return all settings as a recipe.

    Args:
        config: Settings of the run.

    Returns:
        YAML text.
    """
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def _refuse_setting(
    name: str, names: Collection[str] = TrainConfig.__dataclass_fields__
) -> NoReturn:
    names_text = ", ".join(names)
    if name in TrainConfig.__dataclass_fields__:
        raise ValueError(f"{name} must be set in the recipe, because the flags are {names_text}.")
    if name in MODEL_FIELDS and "model" in names:
        raise ValueError(
            f"{name} is not a setting, but a field of model: use --model '{{{name}: VALUE}}', or "
            f"model: {{{name}: VALUE}} in the recipe."
        )
    own_name = NAMES_ELSEWHERE.get(name, "")
    if own_name in names:
        help_text = TrainConfig.__dataclass_fields__[own_name].metadata["help"]
        raise ValueError(f"{name} is not a setting. Use {own_name}: {help_text}.")
    hint = closest_name(name, [*names]) or f" The settings are {names_text}."
    raise ValueError(f"{name} is not a setting.{hint}")


def _is_text_setting(name: str) -> bool:
    return TrainConfig.__dataclass_fields__[name].type in (str, str | None)


def _flag_text(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _parse_text_value(name: str, text: str) -> str | None:
    is_optional = TrainConfig.__dataclass_fields__[name].type == str | None
    if is_optional and text == str(None):
        raise ValueError(f"{name} must be null for no value, got {text}.")
    return None if text == "null" and is_optional else text


def parse_yaml_value(name: str, text: str) -> Any:
    """Parse the value of a flag that is not text.

    Args:
        name: Name of the flag, for an error.
        text: Value on the command line.

    Returns:
        The value.

    Raises:
        ValueError: If the text is not YAML.
    """
    return _parse_yaml(text, name, f"a YAML value, got {shown(text)}")
