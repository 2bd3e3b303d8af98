"""SomaSpeed JAX: supervised fine-tuning of robot foundation models on any GPU mesh."""

__version__ = "0.1.0"
