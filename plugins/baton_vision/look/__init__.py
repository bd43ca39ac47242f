"""The making of `look-tiny`: its pictures and questions, its training, its examination.

Nothing here is imported when the model is served.
"""
