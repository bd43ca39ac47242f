"""Temporary files and folders with unpredictable names, locked while in use and removed after a crash.

The gateway and plugins without it use this library, so it imports neither, only the standard library.
"""

from baton_spool.folders import FolderRefused, require_folder
from baton_spool.spooled import Made, Naming, Swept, make, sweep

__all__ = ["FolderRefused", "Made", "Naming", "Swept", "make", "require_folder", "sweep"]
