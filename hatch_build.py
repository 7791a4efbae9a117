"""Compiles the kernel when the package is installed; without a compiler the package goes on, on oneDNN."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src", "blockdraft", "ops", "native")


class KernelBuildHook(BuildHookInterface):
    """Puts the compiled library into a wheel, which is then one for this kind of machine."""

    def initialize(self, _version: str, build_data: dict[str, Any]) -> None:
        made = runpy.run_path(str(Path(self.root) / NATIVE / "build.py"))
        problem = made["build"]()
        if problem is not None:
            self.app.display_warning(f"the kernel was not compiled: {problem}")
            return
        build_data["artifacts"].append((NATIVE / made["LIBRARY"].name).as_posix())
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
