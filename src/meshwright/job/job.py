"""The job: one TOML file that says what is trained, on what, and how it is split."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from meshwright.errors import InputError
from meshwright.job.batch_section import BatchSection
from meshwright.job.fault_section import FaultSection
from meshwright.job.layout import Layout
from meshwright.job.layout_text import LAYOUT_KEYS, is_auto, parse_layout_values
from meshwright.job.model_spec import ModelSpec
from meshwright.job.recovery_section import RecoverySection
from meshwright.job.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    MemorySection,
    ModelSection,
    ObserveSection,
    OptimizerSection,
    PrecisionSection,
    TrainSection,
)
from meshwright.job.sentences import sentences
from meshwright.job.sync_section import SyncSection
from meshwright.job.toml_text import toml_document

_PATHS = (
    "model.hf", "model.init_from", "data.train", "data.validation", "data.tokenizer", "data.cache", "cluster.machines",
)  # fmt: skip
_DEFAULT_CACHE = ".cache"


class Job(BaseModel):
    """Everything a training run is made of. Immutable; ``resolve`` fills what was left open."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: ModelSection
    data: DataSection
    batch: BatchSection
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    train: TrainSection = Field(default_factory=TrainSection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    layout: Layout = Field(default_factory=Layout)
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    sync: SyncSection = Field(default_factory=SyncSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    recovery: RecoverySection = Field(default_factory=RecoverySection)
    observe: ObserveSection = Field(default_factory=ObserveSection)
    fault: FaultSection = Field(default_factory=FaultSection)

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _auto: bool = PrivateAttr(default=False)

    @model_validator(mode="wrap")
    @classmethod
    def _layout_text(cls, values: object, handler: ModelWrapValidatorHandler[Job]) -> Job:
        text = values.get("layout") if isinstance(values, dict) else None
        if not isinstance(values, dict) or not isinstance(text, str):
            return handler(values)
        if is_auto(text):
            job = handler({**values, "layout": {}})
            job._auto = True
            return job
        try:
            return handler({**values, "layout": parse_layout_values(text)})
        except InputError as error:
            raise ValueError(str(error).removeprefix("layout: ")) from None

    def __eq__(self, other: object) -> bool:
        """Equal values; where they came from does not matter."""
        return isinstance(other, Job) and self._values() == other._values() and self._auto == other._auto

    def __hash__(self) -> int:
        return hash(self._values())

    @property
    def auto(self) -> bool:
        """The layout is left to the planner (``layout = "auto"``); ``with_layout`` gives the job its answer."""
        return self._auto

    def _values(self) -> tuple[BaseModel, ...]:
        return tuple(getattr(self, name) for name in type(self).model_fields)

    @property
    def model_spec(self) -> ModelSpec:
        """The shape of the model, without where it came from."""
        return ModelSpec(**{name: getattr(self.model, name) for name in ModelSpec.model_fields})

    @property
    def bucket_bytes(self) -> int:
        """Gradient bytes of a bucket: the [sync] section's, or else the [memory] section's."""
        return self.sync.bucket_bytes if isinstance(self.sync.bucket_bytes, int) else self.memory.bucket_bytes

    def source(self, key: str) -> str:
        """Where the value of ``key`` (such as ``layout.dp``) came from, in words."""
        section, _, name = key.partition(".")
        given = name in getattr(self, section).model_fields_set
        return self._sources.get(key, "given" if given else "default")

    def with_layout(self, layout: Layout, source: str = "") -> Job:
        """The same job under another layout; ``source`` says where that came from."""
        changed = self.model_copy(update={"layout": layout})
        changed._auto = False
        changed._sources = {key: where for key, where in self._sources.items() if not key.startswith("layout.")}
        if source:
            changed._sources |= {f"layout.{key}": source for key in layout.model_fields_set}
        return changed

    def with_steps(self, steps: int) -> Job:
        """The same job, of so many steps."""
        return self.model_copy(update={"train": self.train.model_copy(update={"steps": steps})})

    def with_fresh_weights(self) -> Job:
        """The same job, not begun from the weights that ``model.init_from`` names."""
        return self.model_copy(update={"model": self.model.model_copy(update={"init_from": None})})

    def resolve(self, ranks: int | None = None, *, ranks_from: str = "the launcher", purpose: str = "train") -> Job:
        """Fill what was left open (ranks, dp, micro-batch, model sizes) and check that all fits together.

        Args:
            ranks: how many ranks there are; absent: ``cluster.ranks``, or as many as the layout takes.
            ranks_from: who says how many ranks there are, for messages.
            purpose: "train", or "plan", which allows what cannot be trained yet.

        Raises:
            InputError: all that does not fit, one sentence a line.
        """
        from meshwright.job.resolve import resolve

        if self.auto:
            raise InputError(
                "layout: auto has not been resolved; ask meshwright.plan(job) for one and use job.with_layout"
            )
        return resolve(self, ranks, ranks_from, purpose)

    def to_toml(self) -> str:
        """The job as a TOML file; sizes of the model in full, so that it stands alone. ``load_job`` reads it back."""
        sections = {name: getattr(self, name).model_dump() for name in type(self).model_fields}
        model = sections["model"]
        for origin in ("preset", "hf"):
            model.pop(origin)
        if self.auto:
            del sections["layout"]
        return ('layout = "auto"\n\n' if self.auto else "") + toml_document(sections)


def load_job(path: str | Path, overrides: Sequence[str] = (), layout: str | None = None) -> Job:
    """Read a job file.

    Relative paths in the file start at its folder, those in ``overrides`` at the current one.

    Args:
        path: the TOML file.
        overrides: ``section.key=value`` texts that replace single values (``--set``).
        layout: short form of a layout that replaces the [layout] section (``--layout``); the file's
            micro-batch stays unless the text gives one. ``auto`` leaves all of it to the planner.

    Raises:
        InputError: the file cannot be read, or values are wrong: all of them, one sentence a line.
    """
    file = Path(path)
    values = _read_toml(file)
    sources = {f"{section}.{key}": file.name for section, table in values.items() for key in _keys(table)}
    _absolute_paths(values, file.parent.resolve(), _PATHS)
    for override in overrides:
        key = _override(values, override)
        sources[key] = "--set"
        _absolute_paths(values, Path.cwd(), (key,))
    if isinstance(values.get("layout"), str) and not is_auto(values["layout"]):
        values["layout"] = parse_layout_values(values["layout"])
        sources |= {f"layout.{key}": file.name for key in values["layout"]}
    if layout is not None:
        _replace_layout(values, layout, sources)
    if isinstance(values.get("data", {}), dict):
        values.setdefault("data", {}).setdefault("cache", str(file.parent.resolve() / _DEFAULT_CACHE))
    job = job_from_values(values)
    job._sources.update(sources)
    return job


def run_job(run: Path) -> Job:
    """The job in the directory of a run.

    Raises:
        InputError: as ``load_job``; each sentence names the file, which nobody gave.
    """
    path = run / "job.toml"
    try:
        return load_job(path)
    except InputError as error:
        lines = str(error).split("\n")
        raise InputError("\n".join(line if str(path) in line else f"{path}: {line}" for line in lines)) from None


def job_from_values(values: dict[str, Any]) -> Job:
    """A job from sections as dictionaries.

    Raises:
        InputError: all wrong values, one sentence a line.
    """
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        raise InputError("\n".join(sentences(error, Job.model_json_schema()))) from None


def _keys(table: object) -> Sequence[str]:
    return tuple(table) if isinstance(table, dict) else ()


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_bytes().decode("utf-8-sig"))  # some editors write a mark first
    except OSError as error:
        raise InputError(f"job: {file} cannot be read ({error.strerror}); give the path of a TOML job file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"job: {file} is not UTF-8 at byte {error.start}; a job file is UTF-8 TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"job: {file} is not TOML: {error}") from None


def _override(values: dict[str, Any], text: str) -> str:
    """Put one ``section.key=value`` into ``values``; the key."""
    key, equals, value_text = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if key.strip() == "layout" and equals:
        values["layout"] = value_text if is_auto(value_text) else parse_layout_values(value_text.strip())
        return "layout"
    if not (equals and dot and section and name) or "." in name:
        raise InputError(f"--set: {text!r} is not of the form section.key=value, for example train.steps=100")
    if section == "layout" and isinstance(values.get("layout"), str):
        values["layout"] = parse_layout_values(values["layout"])
    table = values.setdefault(section, {})
    if not isinstance(table, dict):
        raise InputError(f"--set: {text!r} sets a key of {section}, which is not a section in the job file")
    table[name] = _override_value(section, name, value_text.strip())
    return f"{section}.{name}"


def _override_value(section: str, name: str, text: str) -> object:
    if section == "layout" and name in LAYOUT_KEYS and not text.startswith(("[", '"', "'")):
        return parse_layout_values(f"{name}={text}")[name]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _replace_layout(values: dict[str, Any], text: str, sources: dict[str, str]) -> None:
    if is_auto(text):
        values["layout"] = text
        return
    if not text.strip():
        raise InputError('--layout: "" says nothing; give degrees such as "dp=2 tp=2", "dp=1" for one rank, or auto')
    replaced = parse_layout_values(text)
    before = values.get("layout")
    kept = {key: before[key] for key in ("micro_batch",) if isinstance(before, dict) and key in before}
    for key in [key for key in sources if key.startswith("layout.") and key[7:] not in kept]:
        del sources[key]
    sources |= {f"layout.{key}": "--layout" for key in replaced}
    values["layout"] = kept | replaced


def _absolute_paths(values: dict[str, Any], folder: Path, keys: Sequence[str]) -> None:
    """Make the relative paths among ``keys`` absolute, in place."""

    def absolute(value: object) -> object:
        if isinstance(value, list):
            return [absolute(entry) for entry in value]
        return str(folder / value) if isinstance(value, str) and value else value

    for key in keys:
        section, _, name = key.partition(".")
        table = values.get(section)
        if key not in _PATHS or not isinstance(table, dict) or name not in table:
            continue
        if key == "data.tokenizer" and table[name] == "bytes":
            continue
        if key == "cluster.machines" and not str(table[name]).endswith((".toml", ".json")):
            continue
        table[name] = absolute(table[name])
