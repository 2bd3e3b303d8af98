"""What every configuration starts from: the fields of somaspeed_jax/config.py with their defaults."""

from typing import Any

import ml_collections

from somaspeed_jax.config import Config, to_config_dict


def get_base(**sections: Any) -> ml_collections.ConfigDict:
    """The defaults with some fields changed: `get_base(seed=1, data=dict(path="..."))`.

    Raises KeyError or AttributeError for an unknown field: the ConfigDict is locked.
    """
    config = to_config_dict(Config())
    change(config, **sections)
    return config


def change(config: ml_collections.ConfigDict, **sections: Any) -> None:
    """Sets fields in place, section by section."""
    for name, value in sections.items():
        if isinstance(value, dict):
            section: Any = config[name]
            section.update(value)
        else:
            config[name] = value
