"""A stat logger for vLLM: queue times, use of the KV cache and the phases of steps, as Prometheus series.

The entry point is `baton_stats.plugin:BatonStatLogger`; vLLM takes the class itself, so this module is empty.
"""
