"""foretell serve and foretell deploy: serve a model with OpenAI's API, on this machine or on Ray."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, NoReturn

from foretell.cluster.config import ClusterConfig
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.options import add_options, given_options, nearest_flag
from foretell.sampling_params import generation_overrides
from foretell.server.compat_flags import CompatFlags, check_speculation, merge_options
from foretell.server.config import ServerConfig
from foretell.server.foreign_flags import add_foreign_flags
from foretell.utils.system import gc_paused
from foretell.vllm_config import speculation_from_vllm

from .common import Command, add_engine_arguments, add_model_argument
from .help import HelpAction, Parser

Settings = tuple[ServerConfig, EngineConfig, SpeculationConfig, list[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser, f"the model (default: {EngineConfig.model})")
    parser.add_argument(
        "--config", metavar="FILE", type=Path, default=None, help="YAML file with these settings; flags take precedence"
    )
    add_options(parser.add_argument_group("server"), ServerConfig)
    add_options(parser.add_argument_group("replicas"), ClusterConfig)
    add_engine_arguments(parser)
    group = parser.add_argument_group("flags of other engines")
    add_options(group, CompatFlags, rare=True)
    add_foreign_flags(group)


def run(args: argparse.Namespace) -> int:
    args = with_file(args)
    server, engine, speculation, foreign = settings(args)
    cluster = ClusterConfig(**cluster_options(args))
    set_download_folder(args, cluster)
    if cluster.enabled:
        from foretell.cluster.replica_spec import ReplicaSpec
        from foretell.cluster.run import serve_replicas

        return serve_replicas(cluster, ReplicaSpec(server, engine, speculation), foreign)
    with gc_paused():
        from foretell.server.run import serve

    return serve(server, engine, speculation, foreign)


def settings(args: argparse.Namespace) -> Settings:
    """Return the settings of a server from flags and file."""
    args = with_file(args)
    theirs = CompatFlags(**given_options(args, CompatFlags))
    engine = merge_options(given_options(args, EngineConfig), theirs.engine_options())
    defaults = theirs.sampling_defaults() | generation_overrides(engine.get("override_generation_config"))
    if defaults:
        engine["override_generation_config"] = json.dumps(defaults)
    speculative = merge_options(given_options(args, SpeculationConfig), theirs.speculation_options())
    config = getattr(args, "speculative_config", None)
    speculation = SpeculationConfig(**speculative) if config is None else speculation_from_vllm(config, **speculative)
    check_speculation(speculation)
    foreign = [*dict.fromkeys(getattr(args, "ignored_flags", [])), *theirs.ignored]
    server = ServerConfig(**merge_options(given_options(args, ServerConfig), theirs.server_options()))
    if len(server.served_model_name) > 1 and "model" not in engine:  # the last name may have been meant as the model
        raise RequestError("served_model_name", "has several names; name the model with --model")
    found = EngineConfig(**engine)
    theirs.check_tokenizer(found.model)
    return server, found, speculation, foreign


def cluster_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of replicas from flags."""
    theirs = CompatFlags(**given_options(args, CompatFlags))
    return merge_options(given_options(args, ClusterConfig), theirs.cluster_options())


def set_download_folder(args: argparse.Namespace, cluster: ClusterConfig) -> None:
    """Apply --download-dir, before Hugging Face's library reads its settings from the environment."""
    folder = getattr(args, "download_dir", None)
    if folder is None:
        return
    if cluster.enabled:
        raise RequestError("download_dir", "is for one server; set HF_HUB_CACHE on the machines of the replicas")
    os.environ["HF_HUB_CACHE"] = os.path.abspath(os.path.expanduser(folder))


def with_file(args: argparse.Namespace) -> argparse.Namespace:
    """Return the flags, completed by the file of --config."""
    if args.config is None:
        return args
    return argparse.Namespace(**{**vars(read_file(args.config)), **vars(args), "config": None})


class FileParser(Parser):
    """Parses the flags of a file; errors are about the file."""

    def error(self, message: str) -> NoReturn:
        raise RequestError("config", message)


def read_file(path: Path) -> argparse.Namespace:
    """Parse a YAML file as if its settings were flags."""
    parser = FileParser()
    add_arguments(parser)
    words = [word for name, value in _load(path).items() for word in _flags(parser, path, name, value)]
    found = parser.parse_args(words)
    del found.config
    return found


def _load(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError("config", f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError("config", f"{path} cannot be read: it is not UTF-8") from None
    except yaml.YAMLError as error:
        raise RequestError("config", f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise RequestError("config", f"{path} must have lines such as 'port: 8000'")
    return found


def _flags(parser: FileParser, path: Path, name: Any, value: Any) -> list[str]:
    """Return one setting as flags."""
    flag = "--" + str(name).replace("_", "-")
    known = parser._option_string_actions
    if flag not in known or flag == "--config" or isinstance(known[flag], HelpAction):
        raise RequestError("config", f"{path} has no setting {name!r}{nearest_flag(flag, parser).replace('--', '')}")
    action = known[flag]
    if value is None:
        return []
    if isinstance(value, bool) and action.nargs == 0:
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(action, argparse._AppendAction):
        return [f"{flag}={each}" for each in (value if isinstance(value, list) else [value])]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict | list) else value}"]


SERVE = Command("serve a model over HTTP with OpenAI's API", add_arguments, run)


def add_deploy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="FILE", type=Path, help="YAML file with settings of `foretell serve`, including replicas"
    )
    parser.add_argument("--remove", action="store_true", help="remove the application")


def run_deploy(args: argparse.Namespace) -> int:
    if not vars(read_file(args.config)):
        raise RequestError("config", f"{args.config} is empty; give at least a model: 'model: smollm2-135m'")
    args = with_file(args)
    server, engine, speculation, _ = settings(args)
    given = cluster_options(args)
    cluster = ClusterConfig(**({"replicas": 1} if "autoscaling" not in given else {}) | given)
    from foretell.cluster.replica_spec import ReplicaSpec
    from foretell.cluster.run import deploy_app, remove_app

    return remove_app(cluster) if args.remove else deploy_app(cluster, ReplicaSpec(server, engine, speculation))


DEPLOY = Command("deploy replicas of a model on Ray, or update them", add_deploy_arguments, run_deploy)
