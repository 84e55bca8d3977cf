"""Prints the folder of the torch package of this Python, if there is one."""

import importlib.util
import sysconfig
from pathlib import Path

spec = importlib.util.find_spec("torch")
found = list(spec.submodule_search_locations or []) if spec else []
found += [str(Path(sysconfig.get_path(name)) / "torch") for name in ("purelib", "platlib")]
print(next((folder for folder in found if (Path(folder) / "include").is_dir()), ""))
