"""The sample scene that the package ships."""
