"""Imported last by the process that others are forked from: collections of these skip what was imported before."""

import gc

gc.collect()
gc.freeze()
