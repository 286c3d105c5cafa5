"""Frameworks: the arithmetic of rounds and learners' models, behind three protocols.

`native` (numpy), `torch` and `mlx` each have a module of that name, imported only when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltapost.adapters.protocols import Backend, Model, Value
from deltapost.errors import ConfigurationError, MissingExtra

__all__ = ["Backend", "Model", "Value", "wrap_model"]


def wrap_model(source: Any) -> Model:
    """A Model of what a learner trains: a torch module, or a mapping of names to tensors or numpy arrays.

    A Model is returned as it is. Raises ConfigurationError for anything else, MissingExtra without torch.

    >>> import numpy
    >>> wrap_model({"w": numpy.zeros(2, numpy.float32)}).specs()[0].name
    'w'
    """
    if isinstance(source, Model):
        return source
    sample = next(iter(source.values()), None) if isinstance(source, Mapping) else source
    roots = {base.__module__.partition(".")[0] for base in type(sample).__mro__}
    if "torch" in roots:
        try:
            from deltapost.adapters.torch import TorchModel
        except ImportError:
            raise MissingExtra("torch", needed_for="a torch model") from None
        return TorchModel(source)
    if isinstance(source, Mapping) and "numpy" in roots:
        from deltapost.adapters.native import ArrayModel

        return ArrayModel(source)
    raise ConfigurationError(
        f"{type(source).__name__} is no model deltapost knows",
        hint="pass a torch module, a mapping of names to torch tensors or numpy arrays, or a deltapost Model",
    )
