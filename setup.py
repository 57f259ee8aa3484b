"""Builds wheels that carry the native library, so that users need no compiler; pyproject.toml has all the rest.

On x86-64 Linux with a C++ compiler a wheel has the tag py3-none-linux_x86_64: ctypes loads the library, so it does not
depend on the version of Python. Elsewhere, or if the compiler fails, the wheel is pure Python, and the library is
compiled on first use. An editable install has no library either: its sources change.
"""

from __future__ import annotations

import functools
import platform
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PREBUILT = Path("foretell", "kernels", "native", "prebuilt")


class NativeDistribution(Distribution):
    """The distribution, with a native library if a wheel is built and it compiles."""

    @functools.cached_property
    def native_library(self) -> Path | None:
        """The library, compiled now; None if there is none for this wheel."""
        if "bdist_wheel" not in self.commands or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            return None
        sys.path.insert(0, str(ROOT))
        from foretell.kernels.native.build import BuildError, compile_prebuilt

        try:
            return compile_prebuilt(Path(self.get_command_obj("build").build_base, "native"))
        except BuildError as error:
            print(f"warning: this wheel has no native library: {error}", file=sys.stderr)
            return None

    def has_ext_modules(self) -> bool:
        return self.native_library is not None


class BuildPackage(build_py):
    """Copies the native library next to the Python modules."""

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib, PREBUILT)
        shutil.rmtree(folder, ignore_errors=True)  # an earlier build may have left a library of other sources
        if library := self.distribution.native_library:
            folder.mkdir(parents=True)
            for file in (library, library.with_name(library.name + ".sha256")):
                shutil.copy2(file, folder)


class BuildWheel(bdist_wheel):
    """Builds one wheel for all versions of Python: the library does not use Python's C API."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, system = super().get_tag()
        return "py3", "none", system


setup(distclass=NativeDistribution, cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel})
