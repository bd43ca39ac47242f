"""What vLLM's own metrics leave out, per engine: queue times, how full the KV cache was, what steps computed.

The entry point is `baton_stats.plugin:BatonStatLogger`; vLLM wants the class itself, so nothing is here.
"""
