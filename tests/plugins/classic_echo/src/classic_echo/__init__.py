"""Where vLLM finds the plugin: its entry point, which names the class."""


def register() -> str:
    """Return the class by its qualified name, as vLLM's plugin loader wants it."""
    return "classic_echo.processor.ClassicEcho"
