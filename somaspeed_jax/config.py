"""Every field of a run's configuration, what it means, and what is refused.

A file under configs/ returns an `ml_collections.ConfigDict` with these sections; `resolve` turns it into the frozen,
typed `Config` that the program reads. Unknown fields, wrong types and contradictions are refused before any device
work, all at once, each with the nearest known name.
"""

import dataclasses
import difflib
import json
import types
import typing
from typing import Any

import ml_collections

from somaspeed_jax.mixture_config import mixture_faults


class ConfigError(ValueError):
    """The configuration cannot be used; the message names field, value, expectation and fix."""


@dataclasses.dataclass(frozen=True)
class Model:
    name: str = "pi05"  # pi05 | groot | molmoact2
    size: str = "published"  # a named size of the model; a checkpoint's own config.json overrides the sizes it states
    horizon: int = 0  # actions a chunk; 0: the model's own
    euler_steps: int = 0  # Euler steps at inference; 0: the model's own


@dataclasses.dataclass(frozen=True)
class Pi05:
    state_in_prompt: bool = True  # the robot state as text in the prompt (LeRobot, openpi); false: openpi's pi05_libero
    recipe: str = "lerobot"  # lerobot | openpi: picture resize, normalisation formula, dimensions that the loss counts


@dataclasses.dataclass(frozen=True)
class Groot:
    embodiment: str = "new_embodiment"  # tag that chooses the rows of the embodiment-indexed layers
    mask_vl_padding: bool = True  # a sample does not depend on its neighbours' padding; false: upstream's unmasked VL
    use_percentiles: bool = True  # q01/q99 instead of min/max in the state and action normalisation
    dropout: bool = True  # the model's dropouts (0.2) during training
    state_dropout: float = 0.2  # probability that a sample's encoded state is zeroed during training
    decay_unused_rows: bool = False  # upstream's weight decay of embodiments that are not in the data
    crop_fraction: float = 0.8984375  # side of the crop (random in training, central otherwise) before the last resize
    colour_jitter: tuple[float, ...] = (0.3, 0.4, 0.5, 0.08)  # brightness, contrast, saturation, hue; () for none


@dataclasses.dataclass(frozen=True)
class MolmoAct2:
    behaviour: str = "lerobot_0_6"  # lerobot_0_6 | head: masks, positions and padding of that version
    setup: str = ""  # embodiment text of the prompt, such as "single franka robotic arm in libero"
    control: str = ""  # control mode text of the prompt, such as "delta end-effector pose"
    normalize_gripper: bool = False  # false: dimensions named "gripper" pass through unnormalised


@dataclasses.dataclass(frozen=True)
class Weights:
    path: str = ""  # directory, Hugging Face repo id, or a run's workdir (its trained weights); "": random, from `seed`
    new: tuple[str, ...] = ()  # path patterns that may keep their random initial value when the source lacks them


@dataclasses.dataclass(frozen=True)
class Tune:
    preset: str = "expert"  # expert | full | lora, with the meaning upstream gives them
    trainable: tuple[str, ...] = ()  # full-match path patterns instead of a preset


@dataclasses.dataclass(frozen=True)
class Data:
    path: str = ""  # LeRobot dataset directory, Hugging Face dataset id, or "demo"
    mixture: tuple[str, ...] = ()  # several datasets in place of `path`: "PATH*WEIGHT", or "PATH:EMBODIMENT*WEIGHT" for
    #   groot; each has its own cameras, dimensions and statistics, and its weight's share of the samples
    episodes: tuple[int, ...] = ()  # episodes to use; (): all
    holdout: float = 0.0  # share of the chosen episodes (at least one if > 0) kept for validation, never trained on
    cameras: tuple[str, ...] = ()  # dataset features in the model's camera order; (): all, in the dataset's order
    state_key: str = "observation.state"  # feature that holds the state
    action_key: str = "action"  # feature that holds the actions
    task_key: str = ""  # column that holds the task (an annotation); "": the dataset's task
    default_task: str = ""  # prompt of a dataset that has none
    trust_timestamps: bool = False  # take the rate from the rows where info.json declares another
    tail: str = ""  # repeat | drop: chunks that reach past the end of an episode; "": the model's upstream recipe
    relative_actions: bool = False  # actions relative to the state at the start of the chunk
    relative_exclude: tuple[str, ...] = ("gripper",)  # dimensions whose name contains one of these stay absolute
    normalization: str = ""  # quantiles | min_max | mean_std; "": the model's upstream recipe
    augment: str = ""  # none | the name of a model's recipe; "": the model's upstream recipe
    tokenizer: str = ""  # directory, file or Hugging Face repo id; "": the weights' directory
    prompt_length: int = 0  # tokens; 0: what the dataset's prompts need, fixed before the first step
    workers: int = 2  # processes that decode and transform; 0: in the training process
    prefetch: int = 4  # batches kept ready
    cache: str = "decode"  # decode: frames from video as needed (the default: right for data that is read once or
    #   augmented from full size); frames: decoded once into memory-mapped files (right for many epochs, and for video
    #   with few key frames); synthetic: the first batch for every step, to time the device alone
    cache_gb: float = 100.0  # the frame cache refuses to grow beyond this


@dataclasses.dataclass(frozen=True)
class Stats:
    source: str = "dataset"  # dataset: computed from the chosen rows | checkpoint: kept with the weights | file
    file: str = ""  # statistics file for source = file


@dataclasses.dataclass(frozen=True)
class Batch:
    per_device: int = 8  # samples on a device at a time: a fixed shape
    global_batch: int = 0  # samples a step learns from; 0: per_device x devices. A multiple of that accumulates


@dataclasses.dataclass(frozen=True)
class Optim:
    schedule: str = "lerobot"  # lerobot | openpi | groot | molmoact2 | constant (see optim.py)
    lr: float = 2.5e-5  # peak learning rate
    floor: float = 2.5e-6  # learning rate at the end of the decay
    warmup: int = 1000  # steps
    decay_steps: int = 30_000  # steps at which the floor is reached
    weight_decay: float = 0.01  # decoupled; on what the model's recipe decays
    betas: tuple[float, ...] = (0.9, 0.95)  # of the two moments
    eps: float = 1e-8  # added to the root of the second moment
    clip_norm: float = 1.0  # per clip group; 0: no clipping
    moments: str = "float32"  # float32 | bfloat16: type of the first moment


@dataclasses.dataclass(frozen=True)
class Flow:
    times: int = 1  # K: flow times that share one encoded observation


@dataclasses.dataclass(frozen=True)
class Ema:
    decay: float = 0.0  # of the moving average of trained parameters; 0: none


@dataclasses.dataclass(frozen=True)
class Mesh:
    devices: int = 0  # devices to use; 0: all present
    replica: int = 0  # groups of shards; 0: 1, or what fsdp leaves
    fsdp: int = 0  # shards a parameter is split into; 0: all devices, or what replica leaves
    frozen: str = "replicate"  # replicate | shard: where frozen parameters live


@dataclasses.dataclass(frozen=True)
class Dtype:
    compute: str = "bfloat16"  # bfloat16 | float32: activations and products
    frozen: str = "bfloat16"  # bfloat16 | float32: storage of frozen matrices
    reduce: str = "float32"  # float32 | bfloat16: gradient sums over devices


@dataclasses.dataclass(frozen=True)
class Remat:
    context: str = "none"  # none | keep_gathered | dots | full (models/layers/stack.py): the vision-language model
    expert: str = "none"  # the same for the action expert


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    every: int = 1000  # steps between saves; the last step is always saved
    keep: int = 3  # newest checkpoints kept
    include_frozen: bool = False  # also save what was not trained: one self-contained checkpoint
    allow_changes: tuple[str, ...] = ()  # fields that may differ from the run that is resumed, although they matter


@dataclasses.dataclass(frozen=True)
class Evaluation:
    every: int = 0  # steps between validation losses on the held-out episodes; 0: only at the end
    closed_loop_starts: int = 0  # unseen starts of the demo tabletop played at the end; 0: none


@dataclasses.dataclass(frozen=True)
class Log:
    every: int = 1  # steps between lines in terminal and metrics.jsonl
    tensorboard: bool = True  # event files under workdir/tensorboard
    wandb: str = ""  # project; "": off


@dataclasses.dataclass(frozen=True)
class Profile:
    steps: str = ""  # "10:13" writes a trace of steps 10, 11 and 12 under workdir/profile


@dataclasses.dataclass(frozen=True)
class Config:
    seed: int = 0  # of initial values, data order, noise, flow times, dropout and augmentation
    steps: int = 30_000  # optimiser updates, which the schedule counts to
    stop_after_seconds: float = 0.0  # stop (and save) after so long; the schedule still counts to `steps`. 0: never
    model: Model = Model()
    pi05: Pi05 = Pi05()
    groot: Groot = Groot()
    molmoact2: MolmoAct2 = MolmoAct2()
    weights: Weights = Weights()
    tune: Tune = Tune()
    data: Data = Data()
    stats: Stats = Stats()
    batch: Batch = Batch()
    optim: Optim = Optim()
    flow: Flow = Flow()
    ema: Ema = Ema()
    mesh: Mesh = Mesh()
    dtype: Dtype = Dtype()
    remat: Remat = Remat()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    log: Log = Log()
    profile: Profile = Profile()


CHOICES: dict[str, tuple[str, ...]] = {
    "model.name": ("pi05", "groot", "molmoact2"),
    "pi05.recipe": ("lerobot", "openpi"),
    "molmoact2.behaviour": ("lerobot_0_6", "head"),
    "tune.preset": ("expert", "full", "lora"),
    "data.tail": ("", "repeat", "drop"),
    "data.normalization": ("", "quantiles", "min_max", "mean_std"),
    "data.cache": ("decode", "frames", "synthetic"),
    "stats.source": ("dataset", "checkpoint", "file"),
    "optim.schedule": ("lerobot", "openpi", "groot", "molmoact2", "constant"),
    "optim.moments": ("float32", "bfloat16"),
    "mesh.frozen": ("replicate", "shard"),
    "dtype.compute": ("bfloat16", "float32"),
    "dtype.frozen": ("bfloat16", "float32"),
    "dtype.reduce": ("bfloat16", "float32"),
    "remat.context": ("none", "keep_gathered", "dots", "full"),
    "remat.expert": ("none", "keep_gathered", "dots", "full"),
}

AT_LEAST: dict[str, float] = {
    "steps": 1,
    "stop_after_seconds": 0,
    "model.horizon": 0,
    "data.workers": 0,
    "data.prefetch": 1,
    "data.prompt_length": 0,
    "batch.per_device": 1,
    "batch.global_batch": 0,
    "optim.lr": 0,
    "optim.floor": 0,
    "optim.warmup": 0,
    "optim.decay_steps": 1,
    "optim.weight_decay": 0,
    "optim.clip_norm": 0,
    "flow.times": 1,
    "mesh.devices": 0,
    "mesh.replica": 0,
    "mesh.fsdp": 0,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "evaluation.every": 0,
    "log.every": 1,
}


def to_config_dict(config: Config) -> ml_collections.ConfigDict:
    """The mutable form that a config file edits. Tuples stay tuples, so that overrides are type-checked."""
    sections = {
        field.name: (
            {sub.name: getattr(value, sub.name) for sub in dataclasses.fields(value)}
            if dataclasses.is_dataclass(value := getattr(config, field.name))
            else value
        )
        for field in dataclasses.fields(config)
    }
    return ml_collections.ConfigDict(sections)


def field_names() -> list[str]:
    """Every dotted field name."""
    names = []
    for field in dataclasses.fields(Config):
        if dataclasses.is_dataclass(field.type):
            names += [f"{field.name}.{sub.name}" for sub in dataclasses.fields(field.type)]
        else:
            names.append(field.name)
    return names


def nearest(name: str) -> str:
    """The known field most like `name`, comparing whole names first and last parts second."""
    known = field_names()
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    last = {k.rsplit(".", 1)[-1]: k for k in known}
    close = difflib.get_close_matches(name.rsplit(".", 1)[-1], list(last), n=1, cutoff=0.6)
    return last[close[0]] if close else ""


def unknown_field(name: str) -> str:
    """One line for an unknown field."""
    near = nearest(name)
    return f"config.{name}: unknown field" + (f"; did you mean config.{near}?" if near else "")


def _typed(name: str, kind: Any, value: Any, faults: list[str]) -> Any:
    """`value` as `kind`, or a fault. An int may be a float and a list a tuple; nothing else is cast."""
    origin = typing.get_origin(kind)
    if origin is tuple:
        element = typing.get_args(kind)[0]
        if isinstance(value, (list, tuple)):
            return tuple(_typed(f"{name}[{i}]", element, v, faults) for i, v in enumerate(value))
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    wanted = kind if isinstance(kind, types.GenericAlias) else kind.__name__
    faults.append(f"config.{name}: is {value!r} ({type(value).__name__}), expected {wanted}")
    return value


def _section(cls: type, values: Any, prefix: str, faults: list[str]) -> Any:
    if not isinstance(values, (dict, ml_collections.ConfigDict)):
        faults.append(f"config.{prefix.rstrip('.')}: is {values!r}, expected a section")
        return cls()
    fields = {field.name: field for field in dataclasses.fields(cls)}
    read = {}
    for key in values:
        if key not in fields:
            faults.append(unknown_field(prefix + key))
        elif dataclasses.is_dataclass(fields[key].type):
            read[key] = _section(typing.cast(type, fields[key].type), values[key], f"{key}.", faults)
        else:
            read[key] = _typed(prefix + key, fields[key].type, values[key], faults)
    return cls(**read)


def get(config: Config, name: str) -> Any:
    """The value of a dotted field name."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _contradictions(config: Config) -> list[str]:
    faults = []
    for name, choices in CHOICES.items():
        if get(config, name) not in choices:
            close = difflib.get_close_matches(str(get(config, name)), choices, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            shown = ", ".join(repr(c) for c in choices)
            faults.append(f"config.{name}: is {get(config, name)!r}, expected one of {shown}{hint}")
    for name, least in AT_LEAST.items():
        if not get(config, name) >= least:
            faults.append(f"config.{name}: is {get(config, name)!r}, expected at least {least:g}")
    if not 0.0 <= config.ema.decay < 1.0:
        faults.append(f"config.ema.decay: is {config.ema.decay}, expected 0 (off) up to but not including 1")
    if not 0.0 <= config.data.holdout < 1.0:
        faults.append(f"config.data.holdout: is {config.data.holdout}, expected a share from 0 up to 1")
    if len(config.optim.betas) != 2:
        faults.append(f"config.optim.betas: has {len(config.optim.betas)} values, expected 2")
    if config.optim.floor > config.optim.lr:
        faults.append(f"config.optim.floor: {config.optim.floor} is above config.optim.lr {config.optim.lr}")
    if config.stats.source == "file" and not config.stats.file:
        faults.append("config.stats.file: is empty, but config.stats.source is 'file'; give the file")
    if config.stats.source == "checkpoint" and not config.weights.path:
        faults.append(
            "config.stats.source: is 'checkpoint', but config.weights.path is empty: no checkpoint to take it from"
        )
    faults += mixture_faults(config)
    if config.profile.steps:
        try:
            profile_range(config)
        except ValueError:
            faults.append(f"config.profile.steps: is {config.profile.steps!r}, expected 'first:last+1' such as '10:13'")
    return faults


def profile_range(config: Config) -> range:
    """Steps to trace; empty when off."""
    if not config.profile.steps:
        return range(0)
    first, last = map(int, config.profile.steps.split(":"))
    if not 0 <= first < last:
        raise ValueError(config.profile.steps)
    return range(first, last)


def resolve(values: ml_collections.ConfigDict | dict) -> Config:
    """The typed configuration. Raises ConfigError listing every fault."""
    faults: list[str] = []
    config = _section(Config, values, "", faults)
    if not faults:
        faults = _contradictions(config)
    if faults:
        raise ConfigError("the configuration cannot be used:\n  " + "\n  ".join(faults))
    return config


def to_json(config: Config) -> str:
    """Strict JSON, two spaces, in the order of definition."""
    return json.dumps(dataclasses.asdict(config), indent=2, allow_nan=False)


def from_json(text: str) -> Config:
    """Inverse of `to_json`; unknown and mistyped fields are refused."""
    return resolve(json.loads(text))
