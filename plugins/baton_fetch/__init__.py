"""The one way in which anything of Baton's fetches what a client names: from the operator's hosts, guarded.

No plugin of vLLM's; a library of the gateway (images) and of `baton_geo` (rasters). It needs httpx alone.
"""
