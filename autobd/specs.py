"""Models named on the command line: `timm:NAME`, `torchvision:NAME`, `hf:CLASS`, `package.module:callable`,
`file.py:callable`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch import nn

from .errors import AutobdError, SpecError, nearest

FORMS = (
    "timm:NAME, torchvision:NAME, hf:CLASS (of transformers, from its configuration), package.module:callable or "
    "path/file.py:callable, then key=value,... after a comma"
)


def load_model(spec: str) -> nn.Module:
    """The model that `spec` names, for example `timm:vit_tiny_patch16_224,depth=6`.

    Values are Python literals, or text where they are not. Errors: SpecError with the nearest matches.
    """
    model = load(spec)
    if not isinstance(model, nn.Module):
        raise SpecError(f"'{spec}' does not make a model.", given=type(model).__name__, expected="a torch.nn.Module")
    return model


def load_pair(teacher: str, student: str, weights: bool = True) -> tuple[nn.Module, nn.Module]:
    """Both models; without `weights` on the meta device, where they take no memory, unless one cannot be made there."""
    if not weights:
        try:
            with torch.device("meta"):
                return load_model(teacher), load_model(student)
        except SpecError:  # a constructor that looks at values, or an error that comes again
            pass
    return load_model(teacher), load_model(student)


def load(spec: str) -> Any:
    """What the callable that `spec` names returns, called with the spec's arguments. Errors: SpecError."""
    try:
        return _load(spec)
    except AutobdError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise SpecError(
            f"'{spec}' failed: {type(error).__name__}: {error}", given=f"{where.filename}, line {where.lineno}"
        ) from error


def _load(spec: str) -> Any:
    source, colon, rest = spec.partition(":")
    name, _, arguments = rest.partition(",")
    pairs = re.split(r",(?=[^\W\d]\w*=)", arguments) if arguments else []  # commas inside a value stay
    if not colon or not source or not name:
        raise SpecError("Not a model spec.", given=repr(spec), expected=FORMS)
    kwargs = dict(_argument(pair, spec) for pair in pairs)
    if source == "timm":
        return _timm(name, kwargs)
    if source == "torchvision":
        return _torchvision(name, kwargs)
    if source == "hf":
        return _transformers(name, kwargs, spec)
    function = _attribute(_module(source), name, spec)
    if not callable(function):
        raise SpecError(
            f"'{name}' in {source} cannot be called.", given=type(function).__name__, expected="a class or function"
        )
    return _call(function, kwargs, spec)


def _argument(pair: str, spec: str) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not equals or not key.isidentifier():
        raise SpecError("An argument of the spec is not key=value.", given=f"'{pair}' in '{spec}'", expected=FORMS)
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _timm(name: str, kwargs: dict[str, Any]) -> Any:
    import timm

    if not timm.is_model(name.split(".")[0]):
        raise SpecError(f"timm has no model '{name}'.", expected=f"perhaps {nearest(name, timm.list_models())}")
    return _call(timm.create_model, {"model_name": name, **kwargs}, f"timm:{name}")


def _torchvision(name: str, kwargs: dict[str, Any]) -> Any:
    from torchvision import models

    if name not in models.list_models():
        raise SpecError(
            f"torchvision has no model '{name}'.", expected=f"perhaps {nearest(name, models.list_models())}"
        )
    if name in ("googlenet", "inception_v3"):
        kwargs = {"init_weights": True, **kwargs}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        kwargs = {"weights_backbone": None, **kwargs}  # pretrained by default, also where `weights` are not
    return _call(models.get_model, {"name": name, **kwargs}, f"torchvision:{name}")


def _transformers(name: str, kwargs: dict[str, Any], spec: str) -> Any:
    import transformers

    model = getattr(transformers, name, None)
    if model is None or getattr(model, "config_class", None) is None:
        known = [n for n in dir(transformers) if n.endswith(("Model", "LMHeadModel")) or "For" in n]
        raise SpecError(f"transformers has no model class '{name}'.", expected=f"perhaps {nearest(name, known)}")
    return model(_call(model.config_class, kwargs, spec))


def _module(source: str) -> ModuleType:
    if source.endswith(".py"):
        path = Path(source)
        if not path.is_file():
            close = nearest(path.name, [p.name for p in path.parent.glob("*.py")]) if path.parent.is_dir() else "none"
            raise SpecError(f"There is no file {source}.", expected=f"perhaps {close}")
        name = f"autobd_spec_{path.stem}"  # the file may be called like an installed package
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        cloudpickle.register_pickle_by_value(module)  # other ranks cannot import it
        found.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        raise SpecError(f"There is no module '{source}'.", given=str(error), expected=FORMS) from None


def _attribute(module: ModuleType, name: str, spec: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            public = [n for n in dir(value) if not n.startswith("_")]
            raise SpecError(f"'{spec}' names nothing.", expected=f"perhaps {nearest(part, public)}")
        value = getattr(value, part)
    return value


def _call(function: Any, kwargs: dict[str, Any], spec: str) -> Any:
    try:
        return function(**kwargs)
    except TypeError as error:
        try:
            known = ", ".join(inspect.signature(function).parameters)
        except ValueError:
            known = "unknown"
        raise SpecError(
            f"'{spec}' cannot be called with these arguments: {error}", given=kwargs, expected=f"among: {known}"
        ) from error
