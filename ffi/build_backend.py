"""Builds the package by scikit-build-core; with `-C cmake.define.KERNELS=none` it packs the Python files alone.

Without kernels the package needs no library. So nothing is compiled then, and neither CMake nor what pyproject.toml
lists as "kernels" is needed.
"""

import tomllib
from pathlib import Path

from scikit_build_core import build
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, str | list[str]]


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    return [*build.get_requires_for_build_wheel(_settings(config_settings)), *_of_kernels(config_settings)]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    return [*build.get_requires_for_build_editable(_settings(config_settings)), *_of_kernels(config_settings)]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings | None = None) -> str:
    return build.prepare_metadata_for_build_wheel(metadata_directory, _settings(config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings | None = None) -> str:
    return build.prepare_metadata_for_build_editable(metadata_directory, _settings(config_settings))


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    return build.build_wheel(wheel_directory, _settings(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    return build.build_editable(wheel_directory, _settings(config_settings), metadata_directory)


def _wants_kernels(given: Settings | None) -> bool:
    return (given or {}).get("cmake.define.KERNELS") != "none"


def _settings(given: Settings | None) -> Settings:
    return dict(given or {}) if _wants_kernels(given) else {**(given or {}), "wheel.cmake": "false"}


def _of_kernels(given: Settings | None) -> list[str]:
    groups = tomllib.loads(Path("pyproject.toml").read_text())["dependency-groups"]
    return groups["kernels"] if _wants_kernels(given) else []
