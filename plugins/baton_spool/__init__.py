"""Temporary files and folders of a server: named by nobody else, locked while in use, swept after a kill.

For the gateway and for plugins that run without it, so it imports neither; the standard library alone.
"""

from baton_spool.folders import FolderRefused, require_folder
from baton_spool.spooled import Made, Naming, Swept, make, sweep

__all__ = ["FolderRefused", "Made", "Naming", "Swept", "make", "require_folder", "sweep"]
