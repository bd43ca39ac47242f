"""Read and validate the settings.

Their classes are in `groups` and `request_groups`, the base class in `frozen`; `settings` reads them.
`environment` and `vllm_environment` know the process's environment.
"""
