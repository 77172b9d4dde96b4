"""A recipe: all settings of a run, with a section for each part of the toolkit, read from a YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, ValidationInfo, model_validator

from dragoman.config.settings import Settings, TrainSettings, apply_override, get_entry, parse_settings, read_values
from dragoman.data.corpus import DataSettings
from dragoman.data.tokenizers import TokenizerSettings
from dragoman.errors import UserError

if TYPE_CHECKING:
    from dragoman.decoding.methods import SearchSettings
    from dragoman.models.registry import NeuralModelSettings
    from dragoman.smt.settings import SmtSettings

    ModelSettings = NeuralModelSettings | SmtSettings
else:
    SearchSettings = ModelSettings = Any

# Placeholders for the sections whose settings classes are in modules that import PyTorch, which takes seconds. A caller
# that needs only the other sections passes them to `read_recipe`.
UNREAD_SECTIONS = {"model": Settings(), "search": Settings()}
RECIPES = "recipes"  # name of the folder of the built-in recipes
PACKAGE = Path(__file__).parent


class Recipe(Settings):
    """All settings of a run.

    Values that name a registry entry, such as model.norm, are not validated here but in `check_model` and when training
    starts.
    """

    data: DataSettings = DataSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    model: ModelSettings = Field(default_factory=dict)  # type: ignore[assignment]
    train: TrainSettings = TrainSettings()
    search: SearchSettings = Field(default_factory=dict)  # type: ignore[assignment]

    @model_validator(mode="after")
    def _read_unread_sections(self, info: ValidationInfo) -> Self:
        """Validate the sections `model` and `search`, unless they have been validated already.

        Their classes are imported only here, after the other sections have been found valid. `info.context` has the
        line of each key in the file.
        """
        unread = [name for name in UNREAD_SECTIONS if not isinstance(getattr(self, name), Settings)]
        if unread:
            from dragoman.decoding.methods import SearchSettings

            classes: dict[str, type[Settings]] = {"model": choose_settings_class(self.model), "search": SearchSettings}
            for name in unread:  # set in __dict__, because a recipe is frozen
                cls, values = classes[name], getattr(self, name)
                self.__dict__[name] = parse_settings(cls, values, where=name, key_lines=info.context, root=Recipe)
        return self

    @property
    def neural_model(self) -> NeuralModelSettings:
        """The model section of a recipe that is known to be neural."""
        assert self.model.kind != "smt"
        return self.model

    @property
    def example_format(self) -> str:
        """How texts are converted to examples: a key of EXAMPLE_FORMATS (data/batches.py)."""
        if self.model.task == "generate":
            return "lines" if self.data.documents == "line" else "windows"
        return "pairs" if self.model.task == "translate" else "labels"

    @property
    def batch_layout(self) -> str:
        """How examples are arranged in batches: "packed" or "padded".

        Each window of a language model fills a row (except the last window of a text), so windows are not packed.
        """
        return "padded" if self.example_format == "windows" else self.model.layout

    @property
    def can_bucket_shapes(self) -> bool:
        """Whether batches can be padded to a few fixed shapes. Otherwise each batch is as wide as its longest text."""
        return self.model.layout == "packed" or self.example_format == "pairs"


def list_model_kinds() -> Mapping[str, Mapping[str, type[Settings]]]:
    """Return the settings classes by `model.kind` and `model.backbone`, which is "" for kinds without that setting."""
    from dragoman.models.registry import MODEL_KINDS
    from dragoman.smt.settings import SmtSettings

    return MODEL_KINDS | {"smt": {"": SmtSettings}}


def choose_settings_class(section: Any) -> type[Settings]:
    values = section if isinstance(section, dict) else {}
    backbones = get_entry(list_model_kinds(), str(values.get("kind", "transformer")), "model.kind")
    return backbones.get("") or get_entry(backbones, str(values.get("backbone", "transformer")), "model.backbone")


def read_recipe(
    path: Path,
    overrides: Iterable[str] = (),
    *,
    parent: Recipe | None = None,
    unread: Mapping[str, Settings] | None = None,
) -> Recipe:
    """Read a recipe file and apply `a.b=c` overrides.

    Relative paths of texts are resolved against the working directory first, then against the folder of the recipe
    file. `parent`, the recipe of the run whose weights training starts from, provides the model settings that neither
    the file nor the overrides set. If `unread` is UNREAD_SECTIONS, only the other sections are read, without PyTorch.
    """
    values, key_lines = read_values(path)
    items, merged = list(overrides), deepcopy(values)

    def build_checked(values: dict[str, Any], key_lines: Mapping[str, int] | None = None) -> Recipe:
        recipe = parse_settings(Recipe, inherit_model({**values, **(unread or {})}, parent), key_lines=key_lines)
        recipe.data.check()
        return recipe

    try:
        for item in items:
            apply_override(merged, item)
            key_lines.pop(item.partition("=")[0], None)  # its value is not from the file
        recipe = build_checked(merged, key_lines)
    except UserError as error:
        cause = ""
        with suppress(UserError):  # name the overrides if the recipe is valid without them
            build_checked(values)
            cause = f" with {' '.join(items)}" if items else ""
        raise UserError(f"{path}{cause}: {error}") from None
    sections: dict[str, Settings] = {"data": recipe.data.resolve_paths(path.parent)}
    if not unread and recipe.model.kind == "smt":
        sections["model"] = recipe.model.resolve_paths(path.parent)
    return recipe.model_copy(update=sections)


def override_recipe(recipe: Recipe, overrides: Iterable[str] = (), *, parent: Recipe | None = None) -> Recipe:
    """Apply `a.b=c` overrides; model settings that neither they nor the recipe set are taken from `parent`."""
    values = recipe.model_dump(mode="json", exclude_unset=True)
    for item in overrides:
        apply_override(values, item)
    return parse_settings(Recipe, inherit_model(values, parent))


def inherit_model(values: dict[str, Any], parent: Recipe | None) -> dict[str, Any]:
    """Return the values of a recipe, with missing model settings taken from the parent."""
    section = values.get("model") or {}
    if parent is None or not isinstance(section, dict):
        return values
    if parent.model.kind == "smt":
        raise UserError("a phrase-based system has no weights that another run can start from; leave --init-from out")
    # A model section with only `kind: transformer`, the default, does not override the kind of the parent.
    changes = {} if section == {"kind": "transformer"} else section
    return {**values, "model": {**parent.model.model_dump(mode="json"), **changes}}


def check_model(recipe: Recipe) -> Recipe:
    """Return the recipe; raise a UserError if the model section is invalid or its length limit too low for the data."""
    recipe.model.check()
    limit, longest = recipe.model.length_limit, recipe.data.max_length
    splits_texts = recipe.model.task == "generate"  # a language model is trained on windows, so no text is too long
    if limit is not None and longest >= limit and not splits_texts:
        raise UserError(
            f"data.max_length={longest} must be smaller than model.max_length={limit}, to leave room for the "
            "end-of-sentence token; lower data.max_length or raise model.max_length"
        )
    if recipe.model.kind != "smt" and recipe.model.copying and not recipe.tokenizer.joint:
        raise UserError(
            "model.copying=true copies tokens of the source, so both sides need one vocabulary; set "
            "tokenizer.joint=true"
        )
    return recipe


def find_recipes_folder() -> Path | None:
    """Return the folder of the built-in recipes: inside the installed package, or next to src in a checkout."""
    return next((folder / RECIPES for folder in (PACKAGE, PACKAGE.parents[1]) if (folder / RECIPES).is_dir()), None)


def find_recipe(path: Path) -> Path:
    """Return the path if it exists, else the built-in recipe or folder of recipes with this name.

    Examples of names are `recipes/lectures`, `lectures` and `lectures/21-rotary`. If there is no such recipe, the path
    is returned unchanged.
    """
    folder = find_recipes_folder()
    if folder is None or path.is_absolute() or path.exists():
        return path
    name = Path(*path.parts[1:]) if path.parts[:1] == (RECIPES,) else path
    candidates = [name, name.with_name(name.name + ".yaml")] if name.name else [name]
    return next((folder / candidate for candidate in candidates if (folder / candidate).exists()), path)


def list_recipes() -> Iterator[tuple[str, str]]:
    """Yield the name of every built-in recipe and its description, the comment in the first line."""
    if (folder := find_recipes_folder()) is None:
        return
    for file in sorted(folder.rglob("*.yaml")):
        if file.name != "questions.yaml":  # not a recipe: the questions that a comparison answers
            first = file.read_text(encoding="utf-8").partition("\n")[0]
            yield str(file.relative_to(folder).with_suffix("")), first.removeprefix("#").strip()
