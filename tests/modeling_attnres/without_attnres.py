"""Run a script in a process where `attnres` cannot be imported, however it is installed.

    python -I -S without_attnres.py SITE_PACKAGES SCRIPT [ARGUMENTS]

With `-S` Python reads no `.pth` file, which hides an editable install; this script adds the folders of `SITE_PACKAGES`
to the path. An `attnres` installed from a wheel lies in those folders, and is blocked by name.
"""

import os
import runpy
import sys

_, site_packages, *sys.argv = sys.argv
sys.path += site_packages.split(os.pathsep)
sys.modules["attnres"] = None
try:
    import attnres  # noqa: F401
except ModuleNotFoundError:
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    sys.exit("attnres can be imported here")
