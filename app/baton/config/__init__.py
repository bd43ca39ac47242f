"""Read and validate the settings.

Their classes are in `groups`; `settings` reads them.
`environment` and `vllm_environment` know the process's environment.
"""
