"""SomaSpeed's JSON scaling schema: read, validated and written strictly.

A file holds `system`, `task`, `measurement` and `models`: name -> records, one a device count, by device count. In JSON
every number is a float (`1.0`) and `complete` is the text "True" or "False"; here they are what they mean. Efficiency
is samples/s on N devices over N times samples/s on one, in percent, and is computed anew at every write.
"""

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SYSTEM = "SomaSpeed JAX"
TASK = "supervised fine-tuning"
MEASUREMENT = (
    "Training samples over the sum of step seconds, each step ended when the devices have finished, data loading "
    "included, compile and warm-up left out; minimum and maximum over trials; fixed batch per device."
)
# The order of SomaSpeed's own file; other models follow by name.
MODEL_ORDER = ("molmoact2", "groot", "pi05")
TOP_KEYS = ("system", "task", "measurement", "models")


class SchemaError(ValueError):
    """A scaling file that is not what the schema says: names the file, the field, what was found and expected."""


@dataclasses.dataclass(frozen=True)
class Record:
    """The measurement of one model on one number of devices. The field order is the order in the file.

    system: the file's system in lower case with underscores.
    global_batch: gpus x per_gpu_batch.
    samples_per_second: over all trials together; the minimum and the maximum are those of single trials.
    measured_training_seconds: summed over trials.
    complete: false when a trial failed; all measured fields are then zero.
    efficiency_percent: 0 while the one-device record is missing or incomplete.
    """

    model: str
    system: str
    gpus: int
    per_gpu_batch: int
    global_batch: int
    trials: int
    complete: bool
    samples_per_second: float
    minimum_samples_per_second: float
    maximum_samples_per_second: float
    measured_training_seconds: float
    efficiency_percent: float = 0.0


FIELDS = tuple(field.name for field in dataclasses.fields(Record))
COUNTS = ("gpus", "per_gpu_batch", "global_batch", "trials")
MEASURED = (
    "samples_per_second",
    "minimum_samples_per_second",
    "maximum_samples_per_second",
    "measured_training_seconds",
)


@dataclasses.dataclass(frozen=True)
class ScalingFile:
    """A whole scaling file. `models` maps a model's name to its records, in the order of the file."""

    system: str
    task: str
    measurement: str
    models: Mapping[str, tuple[Record, ...]]

    def record(self, model: str, gpus: int) -> Record | None:
        return next((r for r in self.models.get(model, ()) if r.gpus == gpus), None)


def record_system(system: str) -> str:
    """What a record calls the system that the file calls `system`: "SomaSpeed JAX" -> "somaspeed_jax"."""
    return system.lower().replace(" ", "_")


def measured(model: str, gpus: int, per_gpu_batch: int, trials: Iterable[tuple[int, float]]) -> Record:
    """Our record of trials given as (samples, seconds). Raises ValueError for a trial without samples or seconds."""
    runs = list(trials)
    if not runs or any(samples <= 0 or seconds <= 0 for samples, seconds in runs):
        raise ValueError(f"{model} on {gpus} device(s): trials {runs} hold no measurement; want (samples, seconds) > 0")
    rates = [samples / seconds for samples, seconds in runs]
    seconds = sum(seconds for _, seconds in runs)
    rate = sum(samples for samples, _ in runs) / seconds
    # One trial is its own minimum and maximum to the last bit; rounding must not put the total outside of them.
    rate = min(max(rate, min(rates)), max(rates))
    return Record(
        model, record_system(SYSTEM), gpus, per_gpu_batch, gpus * per_gpu_batch, len(runs),
        True, rate, min(rates), max(rates), seconds,
    )  # fmt: skip


def failed(model: str, gpus: int, per_gpu_batch: int, trials: int) -> Record:
    """Our record of a run that did not finish: incomplete, and zero wherever something would have been measured."""
    system = record_system(SYSTEM)
    return Record(model, system, gpus, per_gpu_batch, gpus * per_gpu_batch, trials, False, 0.0, 0.0, 0.0, 0.0)


def read(path: str | Path) -> ScalingFile:
    """The validated content of `path`. Raises SchemaError naming file and field, FileNotFoundError without a file."""
    path = Path(path)
    try:
        document = json.loads(path.read_text("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
        return parse(document)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{path}: {error}") from error


def parse(document: Any) -> ScalingFile:
    """A ScalingFile from parsed JSON. Raises SchemaError naming the field, what was found and what was expected."""
    _keys(document, TOP_KEYS, "top level")
    for key in TOP_KEYS[:3]:
        _text(document[key], key)
    if not isinstance(document["models"], dict):
        raise SchemaError(f"models: found {_shown(document['models'])}, expected an object of model -> list of records")
    models = {}
    for name, records in document["models"].items():
        if not isinstance(records, list):
            raise SchemaError(f"models.{name}: found {_shown(records)}, expected a list of records")
        models[name] = tuple(_record(record, f"models.{name}[{i}]") for i, record in enumerate(records))
    content = ScalingFile(document["system"], document["task"], document["measurement"], models)
    validate(content)
    return content


def validate(content: ScalingFile) -> None:
    """Raises SchemaError where records contradict each other, the file's system or arithmetic."""
    for name, records in content.models.items():
        where = f"models.{name}"
        gpus = [record.gpus for record in records]
        if 1 not in gpus:
            raise SchemaError(
                f"{where}: device counts {gpus} lack 1, against which efficiency is defined; measure it too"
            )
        if gpus != sorted(set(gpus)):
            raise SchemaError(f"{where}: device counts {gpus}, expected each once and in rising order")
        base = records[gpus.index(1)]
        for i, record in enumerate(records):
            _consistent(record, base, name, content.system, f"{where}[{i}]")


def with_records(content: ScalingFile, new: Iterable[Record]) -> ScalingFile:
    """`content` with `new` in place of records of the same model and device count, sorted, efficiency recomputed."""
    table = {(r.model, r.gpus): r for records in content.models.values() for r in records}
    table |= {(r.model, r.gpus): r for r in new}
    models: dict[str, list[Record]] = {}
    for record in sorted(table.values(), key=lambda r: (*_model_rank(r.model), r.gpus)):
        base = table.get((record.model, 1))
        percent = efficiency(record, base) if base else 0.0
        models.setdefault(record.model, []).append(dataclasses.replace(record, efficiency_percent=percent))
    return dataclasses.replace(content, models={name: tuple(records) for name, records in models.items()})


def efficiency(record: Record, base: Record) -> float:
    """Percent of `gpus` times the one-device rate `base`; 0 where either is incomplete."""
    if not (record.complete and base.complete):
        return 0.0
    return record.samples_per_second / (record.gpus * base.samples_per_second) * 100.0


def write(path: str | Path, content: ScalingFile) -> None:
    """Writes `content` atomically, sorted, efficiency computed anew. Raises SchemaError before any file changes."""
    path = Path(path)
    content = with_records(content, ())
    validate(content)
    models = {name: [_as_json(record) for record in records] for name, records in content.models.items()}
    document = dict(zip(TOP_KEYS, (content.system, content.task, content.measurement, models), strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def open_ours(path: str | Path) -> ScalingFile:
    """Our file at `path`, or an empty one where there is none. Raises SchemaError for another system's file."""
    if not Path(path).exists():
        return ScalingFile(SYSTEM, TASK, MEASUREMENT, {})
    content = read(path)
    if content.system != SYSTEM:
        raise SchemaError(
            f"{path}: system is {content.system!r}, ours is {SYSTEM!r}; records are added only to a file of our own: "
            "name another --output"
        )
    return content


def add(path: str | Path, new: Iterable[Record]) -> ScalingFile:
    """Adds records of ours to the file at `path` (made where absent) and returns the new content."""
    content = with_records(open_ours(path), new)
    write(path, content)
    return content


def _record(document: Any, where: str) -> Record:
    _keys(document, FIELDS, where)
    values: dict[str, Any] = {}
    for field in FIELDS:
        found, name = document[field], f"{where}.{field}"
        if field in ("model", "system"):
            values[field] = _text(found, name)
        elif field == "complete":
            if found not in ("True", "False"):
                raise SchemaError(f'{name}: found {_shown(found)}, expected the text "True" or "False"')
            values[field] = found == "True"
        else:
            if type(found) is not float or not math.isfinite(found) or found < 0:
                raise SchemaError(f"{name}: found {_shown(found)}, expected a float that is not negative, such as 1.0")
            if field in COUNTS and (found < 1 or found != int(found)):
                raise SchemaError(f"{name}: found {found}, expected a whole number of at least 1.0")
            values[field] = int(found) if field in COUNTS else found
    return Record(**values)


def _as_json(record: Record) -> dict[str, Any]:
    raw = dataclasses.asdict(record)
    return {key: value if isinstance(value, str) else _number_or_truth(value) for key, value in raw.items()}


def _number_or_truth(value: bool | int | float) -> str | float:
    return str(value) if isinstance(value, bool) else float(value)


def _consistent(record: Record, base: Record, model: str, system: str, where: str) -> None:
    expected: dict[str, Any] = {
        "model": model,
        "system": record_system(system),
        "per_gpu_batch": base.per_gpu_batch,
        "global_batch": record.gpus * record.per_gpu_batch,
    }
    if not record.complete:
        expected |= dict.fromkeys(MEASURED, 0.0)
    for field, want in expected.items():
        if getattr(record, field) != want:
            raise SchemaError(
                f"{where}.{field}: found {getattr(record, field)!r}, expected {want!r}{_HINT.get(field, '')}"
            )
    if record.complete and record.measured_training_seconds <= 0:
        raise SchemaError(f"{where}.measured_training_seconds: found 0.0 in a complete record")
    low, rate, high = record.minimum_samples_per_second, record.samples_per_second, record.maximum_samples_per_second
    if record.complete and not 0 < low <= rate <= high:
        raise SchemaError(f"{where}: samples per second {low} <= {rate} <= {high} does not hold above zero")
    want = efficiency(record, base)
    if not math.isclose(record.efficiency_percent, want, rel_tol=1e-9):
        raise SchemaError(f"{where}.efficiency_percent: found {record.efficiency_percent}, expected {want}")


_HINT = {
    "per_gpu_batch": ": one batch per device at every device count; measure another batch into another file",
    "global_batch": " = gpus x per_gpu_batch",
    **{field: " in a record that is not complete" for field in MEASURED},
}


def _model_rank(model: str) -> tuple[int, str]:
    return (MODEL_ORDER.index(model), "") if model in MODEL_ORDER else (len(MODEL_ORDER), model)


def _keys(document: Any, expected: tuple[str, ...], where: str) -> None:
    if not isinstance(document, dict):
        raise SchemaError(f"{where}: found {_shown(document)}, expected an object with the keys {', '.join(expected)}")
    if tuple(document) != expected:
        raise SchemaError(
            f"{where}: keys {', '.join(document)}; expected exactly, in this order: {', '.join(expected)}"
        )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise SchemaError(f"{where}: found {_shown(value)}, expected text")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _no_constant(name: str) -> Any:
    raise SchemaError(f"the word {name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        keys = [key for key, _ in pairs]
        raise SchemaError(f"key {next(k for k in keys if keys.count(k) > 1)!r} appears twice in one object")
    return document
